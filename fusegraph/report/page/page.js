// @ts-check
// The page: which graph, view and thing is shown; search, keys, themes.

class App {
  /** @param {Facts} report */
  constructor(report) {
    this.report = report;
    this.number = 0;
    /** @type {{code: HTMLElement, kernel: number}|null} */
    this.shown = null;
    /** @type {GraphView|null} */
    this.view = null;
    /** @type {GraphView|null} the view that was fitted into its box */
    this.fitted = null;
    this.tab = report.differences ? "differences" : "graph";
    byId("title").textContent = report.title;
    this.setTheme(remembered("theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
    byId("theme").addEventListener("click", () => this.setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
    byId("help").addEventListener("click", () => this.showKeys());
    const choose = /** @type {HTMLSelectElement} */ (byId("graphs"));
    choose.append(...report.graphs.map((g, at) => el("option", { value: at }, `${g.name} (${countText(g.kernels.length, "kernel")})`)));
    choose.addEventListener("change", () => this.open(Number(choose.value)));
    byId("choose").hidden = report.graphs.length < 2;
    new Search(this);
    document.addEventListener("keydown", (event) => this.key(event));
    window.addEventListener("resize", () => this.view?.draw());
    this.open(0);
  }

  get graph() {
    return this.report.graphs[this.number];
  }

  /** @param {number} number */
  open(number) {
    this.number = number;
    /** @type {HTMLSelectElement} */ (byId("graphs")).value = String(number);
    byId("subtitle").textContent = `for ${this.report.target.title}, fusegraph ${this.report.version}`;
    this.view = this.graph.kernels.length ? new GraphView(this.graph, this.report.layouts[number], (choice) => this.choose(choice)) : null;
    byId("glance").replaceChildren(...glance(this));
    this.showTab(this.tab);
    this.close();
  }

  /** @param {string} name */
  showTab(name) {
    this.tab = name;
    const views = VIEWS.filter((v) => v.name !== "differences" || this.report.differences);
    byId("tabs").replaceChildren(...views.map((v) => el("button", {
      type: "button", role: "tab", id: `tab-${v.name}`, "aria-selected": v.name === name, "aria-controls": "view", tabindex: v.name === name ? 0 : -1,
      onclick: () => this.showTab(v.name),
      onkeydown: (/** @type {KeyboardEvent} */ e) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
        if (!step) return;
        const at = (views.indexOf(v) + step + views.length) % views.length;
        this.showTab(views[at].name);
        byId(`tab-${views[at].name}`).focus();
      },
    }, v.title)));
    const view = byId("view");
    view.setAttribute("aria-labelledby", `tab-${name}`);
    view.className = `view-${name}`;
    view.scrollTop = 0;
    view.replaceChildren((VIEWS.find((v) => v.name === name) ?? VIEWS[0]).make(this));
    if (name === "graph" && this.view) {
      if (this.fitted !== this.view) requestAnimationFrame(() => this.view?.fit());
      this.fitted = this.view;
      this.view.draw();
    }
  }

  /** Shows what was chosen beside the view. @param {Choice} choice */
  choose(choice) {
    const { what, number = 0 } = choice;
    const kernel = what === "kernel" ? number : what === "item" ? this.graph.items[number].kernel : null;
    const body = what === "kernel" ? kernelDetails(this, number, null)
      : what === "item" ? itemDetails(this, number)
      : what === "inner" && choice.edge ? innerDetails(this, choice.edge)
      : edgeDetails(this, choice.edges ?? [], choice.state ?? "");
    this.fill(body, false);
    this.view?.choose({ kernel, item: what === "item" ? number : null });
    if (choice.stay && kernel !== null) this.view?.show(kernel);
  }

  /** Marks the item of a line of code. @param {number|null} item @param {string[]} parts */
  markItem(item, parts) {
    if (!this.shown) return;
    byId("parts").replaceChildren(el("div", { class: "chosen-node" }, item === null ? el("h3", {}, "Made by a pass") : itemFacts(this, item),
      el("p", { class: "quiet" }, "this line:"), parts.map((part) => el("p", { class: "mono" }, part))));
    this.view?.choose({ kernel: this.shown.kernel, item });
  }

  /** @param {HTMLElement} body @param {boolean} whole */
  fill(body, whole) {
    const details = byId("details");
    const close = el("button", { type: "button", class: "icon close", "aria-label": "Close the details", onclick: () => this.close() }, "×");
    details.replaceChildren(...(whole ? [] : [close]), el("div", { class: "scroll", tabindex: -1 }, body));
    byId("status").textContent = body.querySelector("header")?.textContent ?? "";
  }

  close() {
    this.shown = null;
    this.fill(overview(this), true);
    this.view?.choose({ kernel: null, item: null });
  }

  /** @param {string} theme */
  setTheme(theme) {
    document.documentElement.dataset.theme = theme;
    byId("theme").textContent = theme === "dark" ? "☀" : "☾";
    try {
      localStorage.setItem("fusegraph-theme", theme);
    } catch {
      // Pages opened from disk may have no storage.
    }
  }

  showKeys() {
    const dialog = /** @type {HTMLDialogElement} */ (byId("keys"));
    dialog.replaceChildren(el("h2", {}, "Keys"), factList(KEYS), el("button", { type: "button", onclick: () => dialog.close() }, "Close"));
    dialog.showModal();
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const inText = event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement;
    if (event.key === "Escape" && !inText) this.close();
    if (inText || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "/") byId("search").focus();
    else if (event.key === "?") this.showKeys();
    else if (event.key === "t") byId("theme").click();
    else if (event.key === "f" && this.view) this.view.fold(!this.view.folded);
    else if (/^[1-9]$/.test(event.key)) byId("tabs").querySelectorAll("button")[Number(event.key) - 1]?.click();
    else return;
    event.preventDefault();
  }
}

/** @type {[string, string][]} */
const KEYS = [["/", "search"], ["arrows", "next and previous kernel, in the graph"], ["+ − 0", "zoom in, zoom out, fit"], ["f", "fold or unfold layers that are alike"],
  ["1 … 6", "views"], ["t", "light or dark"], ["Esc", "back to the overview"]];

const VIEWS = [
  { name: "differences", title: "Differences", make: differencesView },
  { name: "graph", title: "Graph", make: graphView },
  { name: "kernels", title: "Kernels", make: kernelsView },
  { name: "decisions", title: "Decisions", make: decisionsView },
  { name: "passes", title: "Passes", make: passesView },
  { name: "times", title: "Times", make: timesView },
  { name: "memory", title: "Memory", make: memoryView },
];

/** @param {string} name */
function remembered(name) {
  try {
    return localStorage.getItem(`fusegraph-${name}`);
  } catch {
    return null;
  }
}

/** The figures on top. @param {App} app */
function glance(app) {
  const { graph } = app;
  const time = total(graph), floor = graph.kernels.reduce((sum, k) => sum + k.floor_us, 0);
  const declined = costlyDeclined(graph).length;
  const tile = (/** @type {string} */ name, /** @type {any} */ value, /** @type {string} */ more, /** @type {number|null} */ share = null) =>
    el("div", { class: "tile" }, el("span", { class: "name" }, name), el("span", { class: "value" }, value), el("span", { class: "more" }, more),
      share === null ? null : el("span", { class: "track", "aria-hidden": "true" }, el("span", { style: `width: ${Math.min(100, 100 * share)}%` })));
  return [
    tile("Kernels", [el("b", {}, `${graph.nodes_built}`), ` node${graph.nodes_built === 1 ? "" : "s"} → `, el("b", {}, `${graph.kernels.length}`)], graph.kernels.length === 1 ? "kernel" : "kernels", graph.kernels.length / Math.max(1, graph.nodes_built)),
    tile("Memory traffic", [el("b", {}, bytesText(graph.bytes_moved))], `of ${bytesText(graph.bytes_unfused)} without fusion`, graph.bytes_moved / Math.max(1, graph.bytes_unfused)),
    tile(isMeasured(graph) ? "Time, measured" : "Time, estimated", [el("b", {}, timeText(time))], `floor ${timeText(floor)}`, floor / Math.max(time, 1e-9)),
    tile("Workspace", [el("b", {}, bytesText(graph.memory.workspace_bytes))], graph.memory.tensors.length ? `for ${countText(graph.memory.tensors.length, "intermediate")}` : "nothing is kept between kernels"),
    tile("Declined", [el("b", {}, `${declined}`)], `${declined === 1 ? "pair" : "pairs"} of kernels that were not fused`),
  ];
}

class Search {
  /** @param {App} app */
  constructor(app) {
    this.app = app;
    this.input = /** @type {HTMLInputElement} */ (byId("search"));
    this.list = byId("found");
    this.at = -1;
    this.input.addEventListener("input", () => this.update());
    this.input.addEventListener("focus", () => this.update());
    this.input.addEventListener("blur", () => setTimeout(() => this.hide(), 150));
    this.input.addEventListener("keydown", (event) => this.key(event));
  }

  hide() {
    this.list.hidden = true;
    this.input.setAttribute("aria-expanded", "false");
    this.input.removeAttribute("aria-activedescendant");
  }

  update() {
    const words = this.input.value.toLowerCase().split(/\s+/).filter(Boolean);
    const { graph } = this.app;
    /** @type {{text: string, more: string, choice: Choice}[]} */
    this.results = [];
    if (words.length) {
      const fits = (/** @type {string} */ text) => words.every((word) => text.toLowerCase().includes(word));
      graph.kernels.forEach((k, at) => fits(`kernel ${k.number} ${k.name} ${k.family}`) && this.results.push({ text: `kernel ${k.number}`, more: `${k.family} · ${k.name}`, choice: { what: "kernel", number: at } }));
      graph.items.forEach((n, at) => fits(`${n.name} ${n.op} ${n.scope} ${n.place} ${n.names.join(" ")}`) && this.results.push({ text: itemLabel(n), more: `${n.op} · ${n.names.join(", ")}`, choice: { what: "item", number: at } }));
      const exact = words.join(" ");
      this.results.sort((a, b) => Number(b.text.toLowerCase() === exact) - Number(a.text.toLowerCase() === exact));
    }
    const most = 40;
    this.list.replaceChildren(...this.results.slice(0, most).map((result, at) => el("li", { role: "option", id: `found-${at}`, "aria-selected": false, onmousedown: () => this.take(at) },
      el("b", {}, cut(result.text, 44)), el("span", {}, cut(result.more, 60)))));
    if (words.length && !this.results.length) this.list.append(el("li", { class: "none" }, "nothing found"));
    if (this.results.length > most) this.list.append(el("li", { class: "none" }, `and ${this.results.length - most} more`));
    this.list.hidden = !words.length;
    this.input.setAttribute("aria-expanded", String(!this.list.hidden));
    this.move(this.results.length ? 0 : -1);
  }

  /** @param {number} at */
  move(at) {
    this.at = at;
    this.list.querySelectorAll("[role=option]").forEach((option, n) => {
      option.setAttribute("aria-selected", String(n === at));
      if (n === at) {
        option.scrollIntoView({ block: "nearest" });
        this.input.setAttribute("aria-activedescendant", option.id);
      }
    });
  }

  /** @param {number} at */
  take(at) {
    const found = this.results?.[at];
    if (!found) return;
    this.hide();
    this.input.blur();
    const kernel = found.choice.what === "kernel" ? found.choice.number : this.app.graph.items[found.choice.number ?? 0].kernel;
    if (this.app.tab !== "graph") this.app.showTab("graph");
    this.app.choose(found.choice);
    if (kernel !== null && kernel !== undefined) requestAnimationFrame(() => this.app.view?.show(kernel));
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const count = Math.min(this.results?.length ?? 0, 40);
    if (event.key === "ArrowDown" && count) this.move((this.at + 1) % count);
    else if (event.key === "ArrowUp" && count) this.move((this.at + count - 1) % count);
    else if (event.key === "Enter") this.take(this.at);
    else if (event.key === "Escape") { this.hide(); this.input.blur(); }
    else return;
    event.preventDefault();
  }
}

new App(JSON.parse(byId("data").textContent ?? ""));
