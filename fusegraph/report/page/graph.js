// @ts-check
// The graph: a card for each kernel, with the nodes that it computes, and lines between them.

const HEAD = 46, ROW = 20, WIDTH = 264, FAR = 0.42;

class GraphView {
  /**
   * @param {Graph} graph @param {{all: Layout, folded: Layout|null}} layouts
   * @param {(choice: Choice) => void} onChoice what is told of clicks
   */
  constructor(graph, layouts, onChoice) {
    this.graph = graph;
    this.layouts = layouts;
    this.onChoice = onChoice;
    this.folded = layouts.folded !== null;
    this.most = Math.max(...graph.kernels.map(timeOf), 1e-9);
    /** @type {Map<number, Inner[]>} lines within cards */
    this.inner = new Map();
    for (const edge of graph.within) {
      const kernel = graph.items[edge.from].kernel ?? -1;
      this.inner.set(kernel, [...(this.inner.get(kernel) ?? []), edge]);
    }
    /** @type {((folded: boolean) => void)|null} what is told when layers are folded or unfolded */
    this.onFold = null;
    this.scale = 1;
    this.x = 0;
    this.y = 0;
    this.world = svg("g", { class: "world" });
    this.lines = svg("g", { class: "lines" });
    this.cards = svg("g", { class: "cards" });
    this.world.append(this.lines, this.cards);
    this.svg = svg("svg", {
      class: "graph", role: "group", tabindex: 0,
      "aria-label": "Graph of kernels. Arrow keys go from kernel to kernel, Enter shows one, plus and minus zoom.",
    }, this.world);
    this.listen();
    this.build();
  }

  get layout() {
    return this.folded && this.layouts.folded ? this.layouts.folded : this.layouts.all;
  }

  /** Draws all lines, and forgets the cards: each is drawn when it is seen. */
  build() {
    this.lines.replaceChildren();
    this.cards.replaceChildren();
    /** @type {{x: number, y: number, height: number, draw: () => SVGElement, made: SVGElement|null, shown: boolean}[]} */
    this.places = this.layout.cards.map(([what, number, x, y, height]) => ({
      x, y, height, made: null, shown: false,
      draw: () => (what === "kernel" ? this.card(number, x, y, height) : what === "input" ? this.input(number, x, y) : this.layers(number, x, y)),
    }));
    /** @type {Map<number, number>} kernels -> positions of their cards */
    this.placeOf = new Map();
    this.layout.cards.forEach(([what, number], at) => {
      if (what === "kernel") this.placeOf.set(number, at);
      if (what === "layers") {
        const [first, length, count] = this.graph.repeats[number];
        for (let k = first + length; k < first + length * count; k++) this.placeOf.set(k, at);
      }
    });
    const between = new Map();
    for (const edge of this.graph.between) {
      const key = `${this.placeOf.get(edge.from)} ${this.placeOf.get(edge.to)}`;
      between.set(key, [...(between.get(key) ?? []), edge]);
    }
    for (const [from, to, points] of this.layout.routes) this.line(points, between.get(`${from} ${to}`) ?? []);
    this.draw();
  }

  /** @param {number[]} points @param {Outer[]} edges */
  line(points, edges) {
    const state = edges.some((e) => e.state === "declined") ? "declined" : "flow";
    const first = edges[0];
    const text = first ? `${first.tensor}, ${bytesText(first.bytes)}: ${first.reason || "written by one kernel, read by another"}` : "input";
    const path = curve(points);
    const group = svg("g", { class: `link ${state}`, "data-from": first?.from, "data-to": first?.to },
      svg("path", { class: "stroke", d: path, "marker-end": null }),
      svg("path", { class: "hit", d: path }, svg("title", {}, text)),
      svg("path", { class: "tip", d: tip(points) }));
    if (first) group.addEventListener("click", () => this.onChoice({ what: "edges", edges, state }));
    this.lines.append(group);
  }

  /** @param {number} number @param {number} x @param {number} y @param {number} height */
  card(number, x, y, height) {
    const kernel = this.graph.kernels[number];
    const scope = commonScope(scopesOf(this.graph, kernel));
    const label = `Kernel ${kernel.number}: ${kernel.family}, ${countText(kernel.rows.length, "node")}, ${timeText(timeOf(kernel))}`;
    const share = timeOf(kernel) / this.most;
    const group = svg("g", {
      class: "card", transform: `translate(${x} ${y})`, "data-kernel": number, role: "button", tabindex: -1,
      "aria-label": label, style: `--family: ${colour(kernel.family)}`,
      onclick: () => this.onChoice({ what: "kernel", number }),
    },
      svg("rect", { class: "body", width: WIDTH, height, rx: 9 }),
      svg("path", { class: "head", d: `M0 9a9 9 0 0 1 9-9h${WIDTH - 18}a9 9 0 0 1 9 9v${HEAD - 15}H0z` }),
      svg("text", { class: "number", x: 12, y: 18 }, `${kernel.number}`),
      svg("text", { class: "family", x: 14 + 8 * String(kernel.number).length + 6, y: 18 }, kernel.family.replaceAll("_", " ")),
      svg("text", { class: "time", x: WIDTH - 12, y: 18 }, timeText(timeOf(kernel))),
      svg("text", { class: "scope", x: 12, y: 33 }, scope ? cutLeft(scope, 40) : cut(kernel.name, 40)),
      svg("rect", { class: "share", x: 0, y: HEAD - 6, height: 3, width: Math.max(2, WIDTH * share) }),
      svg("text", { class: "big", x: WIDTH / 2, y: Math.min(height / 2 + 14, 60) }, `${kernel.number}`));
    this.markCard(group);
    return group;
  }

  /** Draws the rows of a card, which are not seen from afar. @param {SVGElement} card */
  rows(card) {
    const number = Number(card.getAttribute("data-kernel")), kernel = this.graph.kernels[number];
    if (!card.hasAttribute("data-kernel") || card.querySelector(".rows")) return;
    card.append(svg("g", { class: "rows" }, kernel.rows.map((at, row) => this.row(at, row)), this.threads(number, kernel)));
    this.markCard(card);
  }

  /** @param {number} at @param {number} row */
  row(at, row) {
    const item = this.graph.items[at], room = Math.max(10, 34 - item.name.length);
    const more = item.name.startsWith(item.op) || item.name === `${item.op}_` ? `[${item.shape.join(", ")}]` : item.op;
    return svg("g", {
      class: `row ${item.state}${item.made ? " made" : ""}`, transform: `translate(0 ${HEAD + row * ROW})`, "data-item": at,
      onclick: (/** @type {Event} */ event) => { event.stopPropagation(); this.onChoice({ what: "item", number: at }); },
    },
      svg("rect", { class: "back", x: 4, width: WIDTH - 8, height: ROW, rx: 4 }),
      svg("circle", { class: "dot", cx: 18, cy: ROW / 2, r: 3 }),
      svg("text", { class: "name", x: 32, y: 14 }, cut(item.name, 24)),
      svg("text", { class: "op", x: WIDTH - 12, y: 14 }, item.output ? `${cut(more, room - 2)} ⟶` : cut(more, room)),
      svg("title", {}, `${item.scope || item.name}\n${item.parts.join("\n")}\n${typeText(item)}`));
  }

  /** Draws the lines between the rows of a card. @param {number} number @param {Kernel} kernel */
  threads(number, kernel) {
    const group = svg("g", { class: "threads" });
    const rowOf = new Map(kernel.rows.map((at, row) => [at, row]));
    for (const edge of this.inner.get(number) ?? []) {
      const [a, b] = [rowOf.get(edge.from), rowOf.get(edge.to)];
      if (a === undefined || b === undefined) continue;
      const [from, to] = [a, b].map((row) => HEAD + row * ROW + ROW / 2);
      const bend = b - a === 1 ? 0 : Math.min(12, 4 + 2 * (b - a));
      const d = `M18 ${from}C${18 - bend} ${from} ${18 - bend} ${to} 18 ${to}`;
      group.append(svg("g", { class: "link fused", onclick: (/** @type {Event} */ e) => {
        e.stopPropagation();
        this.onChoice({ what: "inner", edge });
      } }, svg("path", { class: "stroke", d }), svg("path", { class: "hit", d }, svg("title", {}, `fused: ${edge.reason}`))));
    }
    return group;
  }

  /** @param {number} number @param {number} x @param {number} y */
  input(number, x, y) {
    const tensor = this.graph.inputs[number];
    return svg("g", { class: "card given", transform: `translate(${x} ${y})` },
      svg("rect", { class: "body", x: 30, width: WIDTH - 60, height: 30, rx: 15 }),
      svg("text", { class: "label", x: WIDTH / 2, y: 19 }, cut(`${tensor.name}  ${typeText(tensor)}`, 32)),
      svg("title", {}, `input ${tensor.name}: ${typeText(tensor)}`));
  }

  /** @param {number} number @param {number} x @param {number} y */
  layers(number, x, y) {
    const [first, length, count] = this.graph.repeats[number];
    const more = countText(count - 1, "more layer");
    return svg("g", {
      class: "card layers", transform: `translate(${x} ${y})`, role: "button", tabindex: -1, "data-layers": number,
      "aria-label": `${more} of ${countText(length, "kernel")} each, like kernels ${first + 1} to ${first + length}. Unfold.`,
      onclick: () => { this.fold(false); this.show(first + length); },
    },
      svg("rect", { class: "body", x: 8, y: 8, width: WIDTH - 8, height: 50, rx: 9 }),
      svg("rect", { class: "body", x: 4, y: 4, width: WIDTH - 8, height: 50, rx: 9 }),
      svg("rect", { class: "body", width: WIDTH - 8, height: 50, rx: 9 }),
      svg("text", { class: "label", x: WIDTH / 2 - 4, y: 22 }, `× ${count}   ${more} like it`),
      svg("text", { class: "scope", x: WIDTH / 2 - 4, y: 39 }, `kernels ${first + length + 1}–${first + length * count}, click to unfold`));
  }

  /** @param {boolean} folded */
  fold(folded) {
    if (this.folded === folded || !this.layouts.folded) return;
    this.folded = folded;
    this.build();
    this.onFold?.(folded);
  }

  // ---- where one looks

  /** Draws what is in sight, once for each frame. */
  draw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      const { width, height } = this.svg.getBoundingClientRect();
      if (!width) return;
      this.world.setAttribute("transform", `translate(${this.x} ${this.y}) scale(${this.scale})`);
      this.svg.classList.toggle("far", this.scale < FAR);
      const [left, top] = [-this.x / this.scale, -this.y / this.scale];
      const [right, below] = [left + width / this.scale, top + height / this.scale];
      for (const place of this.places ?? []) {
        const seen = place.x < right && place.x + WIDTH > left && place.y < below && place.y + place.height > top;
        if (seen && !place.made) this.cards.append((place.made = place.draw()));
        if (place.made && seen && this.scale >= FAR) this.rows(place.made);
        if (place.made && seen !== place.shown) place.made.style.display = seen ? "" : "none";
        place.shown = seen;
      }
    });
  }

  /** Shows all of the graph, or its beginning where it is too long to be read. */
  fit() {
    const { width, height } = this.svg.getBoundingClientRect();
    if (!width) return;
    const [w, h] = this.layout.size;
    const whole = Math.min((width - 60) / w, (height - 60) / h, 1.1);
    this.scale = Math.max(whole, Math.min(0.9, (width - 60) / w), 0.05);
    const [, , first] = this.layout.cards.find(([what]) => what === "kernel") ?? ["", 0, 0];
    this.x = whole >= this.scale ? (width - w * this.scale) / 2 : width / 2 - (first + WIDTH / 2) * this.scale;
    this.y = h * this.scale < height - 60 ? (height - h * this.scale) / 2 : 30;
    this.draw();
  }

  /** @param {number} factor @param {number} [cx] @param {number} [cy] */
  zoom(factor, cx, cy) {
    const box = this.svg.getBoundingClientRect();
    const [x, y] = [cx ?? box.width / 2, cy ?? box.height / 2];
    const scale = Math.min(2.5, Math.max(0.03, this.scale * factor));
    this.x = x - ((x - this.x) * scale) / this.scale;
    this.y = y - ((y - this.y) * scale) / this.scale;
    this.scale = scale;
    this.draw();
  }

  /** Moves a kernel's card into sight. @param {number} number */
  show(number) {
    let at = this.placeOf?.get(number);
    if (at !== undefined && this.layout.cards[at][0] === "layers") {
      this.fold(false);
      at = this.placeOf?.get(number);
    }
    if (at === undefined) return;
    const [, , x, y, height] = this.layout.cards[at];
    const box = this.svg.getBoundingClientRect();
    if (this.scale < 0.6) this.scale = 0.85;
    this.x = box.width / 2 - (x + WIDTH / 2) * this.scale;
    this.y = box.height / 2 - (y + Math.min(height, 300) / 2) * this.scale;
    this.draw();
  }

  /** @param {{kernel: number|null, item: number|null}} chosen */
  choose(chosen) {
    this.chosen = chosen;
    this.mark();
  }

  mark() {
    const kernel = String(this.chosen?.kernel ?? null);
    for (const card of this.cards.children) this.markCard(card);
    for (const line of this.lines.children) {
      line.classList.toggle("near", line.getAttribute("data-from") === kernel || line.getAttribute("data-to") === kernel);
    }
  }

  /** @param {Element} card */
  markCard(card) {
    const { kernel = null, item = null } = this.chosen ?? {};
    const its = card.getAttribute("data-kernel") === String(kernel);
    card.classList.toggle("chosen", its);
    card.setAttribute("tabindex", its ? "0" : "-1");
    for (const row of card.querySelectorAll("[data-item]")) row.classList.toggle("chosen", row.getAttribute("data-item") === String(item));
  }

  listen() {
    this.svg.addEventListener("wheel", (event) => {
      event.preventDefault();
      const e = /** @type {WheelEvent} */ (event);
      const box = this.svg.getBoundingClientRect();
      if (e.ctrlKey || e.metaKey) this.zoom(Math.exp(-e.deltaY / 150), e.clientX - box.left, e.clientY - box.top);
      else {
        this.x -= e.shiftKey ? e.deltaY : e.deltaX;
        this.y -= e.shiftKey ? 0 : e.deltaY;
        this.draw();
      }
    }, { passive: false });
    this.svg.addEventListener("pointerdown", (event) => {
      const start = /** @type {PointerEvent} */ (event);
      if (start.button) return;
      const [x, y] = [this.x, this.y];
      const move = (/** @type {PointerEvent} */ e) => {
        if (Math.hypot(e.clientX - start.clientX, e.clientY - start.clientY) < 4) return;
        this.svg.classList.add("held");
        this.x = x + e.clientX - start.clientX;
        this.y = y + e.clientY - start.clientY;
        this.draw();
      };
      const end = () => {
        window.removeEventListener("pointermove", move);
        setTimeout(() => this.svg.classList.remove("held"));
      };
      window.addEventListener("pointermove", move);
      window.addEventListener("pointerup", end, { once: true });
    });
    // A click that ends a drag chooses nothing.
    this.svg.addEventListener("click", (event) => {
      if (this.svg.classList.contains("held")) event.stopPropagation();
    }, { capture: true });
    this.svg.addEventListener("keydown", (event) => {
      const key = /** @type {KeyboardEvent} */ (event).key;
      const step = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[key];
      const at = this.chosen?.kernel ?? -1;
      if (step) {
        const number = Math.min(this.graph.kernels.length - 1, Math.max(0, at + step));
        this.onChoice({ what: "kernel", number, stay: true });
      } else if (key === "+" || key === "=") this.zoom(1.25);
      else if (key === "-") this.zoom(0.8);
      else if (key === "0") this.fit();
      else return;
      event.preventDefault();
    });
  }
}

/** @typedef {{what: string, number?: number, edges?: Outer[], edge?: Inner, state?: string, stay?: boolean}} Choice */

/** Returns a smooth line through points that come in pairs of one layer. @param {number[]} p */
function curve(p) {
  let d = `M${p[0]} ${p[1]}`;
  for (let n = 2; n < p.length; n += 2) {
    const [x0, y0, x, y] = [p[n - 2], p[n - 1], p[n], p[n + 1]];
    const mid = (y0 + y) / 2;
    d += x === x0 ? `V${y}` : `C${x0} ${mid} ${x} ${mid} ${x} ${y}`;
  }
  return d;
}

/** Returns the head of an arrow. @param {number[]} p */
function tip(p) {
  const [x, y] = [p[p.length - 2], p[p.length - 1]];
  return `M${x - 4.5} ${y - 8}L${x} ${y}L${x + 4.5} ${y - 8}z`;
}

/** Returns the module that all of some paths are in. @param {string[]} scopes */
function commonScope(scopes) {
  const known = scopes.filter(Boolean).map((s) => s.split("."));
  if (!known.length) return "";
  let at = 0;
  while (known[0][at] !== undefined && known.every((s) => s[at] === known[0][at])) at += 1;
  const common = known[0].slice(0, at).join(".");
  const rest = [...new Set(known.map((s) => s.slice(at).join(".")).filter(Boolean))];
  if (rest.length === 1) return [common, rest[0]].filter(Boolean).join(".");
  return rest.length ? `${common}${common ? "." : ""}{${rest.join(", ")}}` : common;
}

/** @param {Graph} graph @param {Kernel} kernel */
const scopesOf = (graph, kernel) => kernel.rows.map((row) => graph.items[row].scope);

/** What a kernel is called: the modules that it computes, or the name of its code. @param {Graph} graph @param {Kernel} kernel */
const titleOf = (graph, kernel) => commonScope(scopesOf(graph, kernel)) || kernel.name;

/** What users call an item: its module where that is one of its own, else its name. @param {Item} item */
const itemLabel = (item) => (item.scope && (item.scope === item.name || item.scope.endsWith(`.${item.name}`)) ? item.scope : item.name);

/** What users call a node: its module and operator. @param {Graph} graph @param {string} name */
function labelOf(graph, name) {
  const item = graph.items.find((i) => i.names.includes(name));
  return !item || !item.scope ? name : itemLabel(item) === item.name ? `${item.scope} ${item.name}` : itemLabel(item);
}

/** Shortens a text at its beginning. @param {string} text @param {number} most */
const cutLeft = (text, most) => (text.length <= most ? text : `…${text.slice(text.length - most + 1)}`);
