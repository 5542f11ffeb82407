// @ts-check
// The panel beside the views: what is known of a kernel, a node or a line.

/** @param {string} title @param {...any} children */
const section = (title, ...children) => el("section", { class: "part" }, el("h3", {}, title), ...children);

/** @param {[string, any][]} pairs */
const factList = (pairs) =>
  el("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));

/** @param {string} text @param {() => void} onclick @param {string} [hint] */
const link = (text, onclick, hint) => el("button", { type: "button", class: "link-button", onclick, title: hint }, text);

/** @param {string} family */
const tag = (family) => el("span", { class: "tag", style: `--family: ${colour(family)}` }, family.replaceAll("_", " "));

/** Draws a time beside what it takes at least. @param {Kernel} k */
function floorBar(k) {
  const time = timeOf(k), most = Math.max(time, k.floor_us);
  const what = k.measured_us === null ? "estimated" : "measured";
  const bound = k.memory_us >= k.compute_us ? "memory" : "arithmetic";
  const text = `${timeText(time)} ${what}, ${(time / k.floor_us).toFixed(2)} times its floor of ${timeText(k.floor_us)}, which is set by ${bound}`;
  return el("div", { class: "floor", role: "img", "aria-label": text },
    el("div", { class: "track" },
      el("span", { class: "took", style: `width: ${(100 * time) / most}%; --family: ${colour(k.family)}` }),
      el("span", { class: "least", style: `left: ${(100 * k.floor_us) / most}%` })),
    el("p", {}, text));
}

/** @param {App} app @param {Tensor[]} tensors */
const tensorTable = (app, tensors) =>
  el("table", { class: "plain" }, el("tbody", {}, tensors.map((t) =>
    el("tr", {}, el("th", { scope: "row" }, t.name), el("td", {}, typeText(t)), el("td", { class: "num" }, bytesText(t.bytes))))));

/** The nodes of a kernel under the lines of source that they are from. @param {App} app @param {number[]} rows */
function nodeList(app, rows) {
  let place = "";
  return el("ul", { class: "nodes" }, rows.map((at) => {
    const item = app.graph.items[at];
    const fresh = item.place && item.place !== place;
    place = item.place || place;
    return [
      fresh ? el("li", {}, el("code", { class: "place", title: item.place }, item.place)) : null,
      el("li", { class: item.made ? "made" : item.state }, link(itemLabel(item), () => app.choose({ what: "item", number: at })), " ",
        el("span", { class: "quiet" }, `${item.op} ${typeText(item)}`)),
    ];
  }));
}

const UNDECIDED = "Written by one kernel and read by another; a pass put something between the two nodes, so that fusion did not weigh the pair.";

/** What the state of a node means. @type {Object<string, string>} */
const STATES = {
  computed: "computed by this kernel",
  merged: "part of this kernel after a rewrite: it has no result of its own any more",
  view: "moves no element: its result is read or written in place",
  packed: "computed once of parameters and constants, not in every call",
  removed: "needs no computation: nothing reads it, or a rewrite took it away",
};

/** Buttons that go to the parts of a panel. */
function jumps() {
  const parts = ["Nodes", "Schedule", "Reads", "Why it is a kernel of its own", "CUDA C"];
  return el("div", { class: "jump", role: "navigation", "aria-label": "Parts" }, parts.map((part) => el("button", {
    type: "button", onclick: (/** @type {Event} */ event) => {
      const titles = [.../** @type {HTMLElement} */ (event.currentTarget).closest(".details-body")?.querySelectorAll(".part h3") ?? []];
      titles.find((title) => title.textContent?.startsWith(part))?.scrollIntoView({ block: "start" });
    },
  }, part.replace("Why it is a kernel of its own", "Why").replace("Reads", "Memory"))));
}

/** @param {App} app @param {number} number @param {number|null} item */
function kernelDetails(app, number, item) {
  const { graph } = app;
  const k = graph.kernels[number], source = app.report.sources[k.source];
  const seconds = timeOf(k) * 1e-6;
  const code = codeBlock(source, app.report.classes, (parts, line) => {
    const owner = parts.map((part) => k.owners[part]).find((at) => at !== null && at !== undefined);
    markLines(code, parts);
    for (const marked of code.querySelectorAll(".line.here")) marked.classList.remove("here");
    code.querySelector(`[data-line="${line}"]`)?.classList.add("here");
    app.markItem(owner ?? null, parts.map((part) => k.parts[part]));
  });
  const out = graph.between.filter((e) => e.from === number), into = graph.between.filter((e) => e.to === number);
  const same = graph.kernels.filter((other) => other.source === k.source && other !== k);
  const forms = new Map();
  for (const [form, reason] of Object.entries(k.declined_forms)) forms.set(reason, [...(forms.get(reason) ?? []), form]);
  const chosen = item === null ? null : el("div", { class: "chosen-node" }, itemFacts(app, item));
  const parts = item === null ? [] : k.owners.flatMap((owner, part) => (owner === item ? [part] : []));
  const result = el("div", { class: "details-body" },
    el("header", {}, tag(k.family), el("h2", { tabindex: -1 }, `Kernel ${k.number}`), el("p", { class: "quiet mono" }, k.name)),
    jumps(),
    chosen,
    floorBar(k),
    factList([
      ["moves", bytesText(k.bytes)],
      ["operations", opsText(k.operations)],
      ["bytes a second", `${scaled(k.bytes / seconds, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"])}`],
      ["operations a second", `${scaled(k.operations / seconds, ["op/s", "kop/s", "Mop/s", "Gop/s", "Top/s"])}`],
      ["share of the graph", shareText(timeOf(k) / Math.max(total(graph), 1e-9))],
      ["saved by fusion", k.bytes_saved > 0 ? bytesText(k.bytes_saved) : null],
      ["blocks", `${k.grid.join(" × ")} of ${k.block.filter((n, at) => at === 0 || n > 1).join(" × ")} threads`],
      ["shared memory", bytesText(source.shared_bytes ?? k.dynamic_shared_bytes)],
      ["registers", source.registers === undefined ? null : `${source.registers}${source.spill_bytes ? `, ${bytesText(source.spill_bytes)} spilled` : ""}`],
    ]),
    section(`Nodes (${k.rows.length})`, nodeList(app, k.rows)),
    section("Schedule", el("p", { class: "mono" }, k.schedule), el("p", { class: "quiet" }, `chosen by: ${k.chosen_by}`),
      [...forms].map(([reason, names]) => el("p", { class: "no" }, el("b", {}, `no ${names.join(" or ")}: `), reason))),
    section("Reads", tensorTable(app, k.reads)),
    section("Writes", tensorTable(app, k.writes)),
    into.length || out.length ? section("Why it is a kernel of its own", el("ul", { class: "reasons" },
      into.map((e) => reasonLine(app, e, e.from, "after")), out.map((e) => reasonLine(app, e, e.to, "before")))) : null,
    same.length ? section("Same code", el("p", {}, same.map((other) => [link(`kernel ${other.number}`, () => app.choose({ what: "kernel", number: other.number - 1 })), " "]))) : null,
    section("CUDA C", el("p", { class: "quiet" }, "A click on a line shows its nodes; a click on a node marks its lines."), el("div", { id: "parts" }), code));
  app.shown = { code, kernel: number };
  if (parts.length) markLines(code, parts);
  return result;
}

/** @param {App} app @param {Outer} edge @param {number} other @param {string} where */
const reasonLine = (app, edge, other, where) =>
  el("li", { class: edge.state }, link(`${where} kernel ${app.graph.kernels[other].number}`, () => app.choose({ what: "kernel", number: other })),
    el("span", { class: "quiet" }, ` ${labelOf(app.graph, edge.producer)}, ${bytesText(edge.bytes)}`),
    el("p", {}, edge.reason || UNDECIDED));

/** @param {App} app @param {number} at */
function itemFacts(app, at) {
  const item = app.graph.items[at];
  return [
    el("h3", {}, itemLabel(item), " ", el("span", { class: "quiet" }, item.op)),
    item.place ? el("code", { class: "place" }, item.place) : null,
    item.parts.map((part) => el("p", { class: "mono" }, part)),
    el("p", { class: "quiet" }, `${typeText(item)} · ${item.made ? "made by a pass: it is not in the graph as you wrote it" : STATES[item.state]}`),
  ];
}

/** @param {App} app @param {number} at */
function itemDetails(app, at) {
  const item = app.graph.items[at];
  if (item.kernel !== null) return kernelDetails(app, item.kernel, at);
  return el("div", { class: "details-body" }, el("header", {}, el("h2", { tabindex: -1 }, item.name)), itemFacts(app, at));
}

/** @param {App} app @param {Outer[]} edges @param {string} state */
function edgeDetails(app, edges, state) {
  const [a, b] = [edges[0].from, edges[0].to].map((at) => app.graph.kernels[at]);
  return el("div", { class: "details-body" },
    el("header", {}, el("span", { class: `tag edge ${state}` }, state === "declined" ? "not fused" : "in memory"),
      el("h2", { tabindex: -1 }, `Kernel ${a.number} → kernel ${b.number}`)),
    edges.map((edge) => el("div", { class: "edge-facts" },
      el("p", { class: "reason" }, edge.reason || UNDECIDED),
      factList([
        ["tensor", edge.tensor],
        ["made by", labelOf(app.graph, edge.producer)],
        ["bytes", bytesText(edge.bytes)],
        ["to write and read it", `${timeText((2 * edge.bytes) / app.report.target.bytes_per_us)} at least`],
      ]))),
    el("p", {}, link(`Show kernel ${a.number}`, () => app.choose({ what: "kernel", number: a.number - 1 })), " ",
      link(`Show kernel ${b.number}`, () => app.choose({ what: "kernel", number: b.number - 1 }))));
}

/** @param {App} app @param {Inner} edge */
function innerDetails(app, edge) {
  const [from, to] = [app.graph.items[edge.from], app.graph.items[edge.to]];
  const kernel = from.kernel ?? 0;
  return el("div", { class: "details-body" },
    el("header", {}, el("span", { class: "tag edge fused" }, "fused"), el("h2", { tabindex: -1 }, `${from.name} → ${to.name}`)),
    el("p", { class: "reason" }, edge.reason),
    factList([
      ["tensor", edge.tensor],
      ["bytes", bytesText(edge.bytes)],
      ["saved", edge.saved ? bytesText(edge.saved) : null],
    ]),
    el("p", {}, link(`Show kernel ${kernel + 1}`, () => app.choose({ what: "kernel", number: kernel }))));
}

/** What is shown before anything is chosen. @param {App} app */
function overview(app) {
  const { graph } = app;
  const whole = Math.max(total(graph), 1e-9);
  const costly = alike(graph.kernels, (k) => String(k.source), timeOf).slice(0, 8);
  const declined = alike(costlyDeclined(graph), (e) => `${graph.kernels[e.from].source} ${graph.kernels[e.to].source}`, (e) => e.bytes).slice(0, 5);
  const families = [...new Set(graph.kernels.map((k) => k.family))];
  const times = (/** @type {number} */ n) => (n > 1 ? el("span", { class: "times" }, `× ${n}`) : null);
  return el("div", { class: "details-body" },
    el("header", {}, el("h2", { tabindex: -1 }, "Where the time goes"), el("p", { class: "quiet" }, `${isMeasured(graph) ? "measured" : "estimated by the cost model"}, kernels of the same code together`)),
    el("ol", { class: "bars" }, costly.map(({ first: k, count, sum }) => el("li", {},
      el("button", { type: "button", onclick: () => app.choose({ what: "kernel", number: k.number - 1, stay: true }) },
        el("span", { class: "bar", style: `width: ${(100 * sum) / costly[0].sum}%; --family: ${colour(k.family)}` }),
        el("span", { class: "bar-text" }, el("b", {}, `${k.number}`), ` ${cut(titleOf(graph, k), 36)} `, times(count)),
        el("span", { class: "bar-number" }, `${timeText(sum)} · ${shareText(sum / whole)}`))))),
    declined.length ? section("Costliest fusions that were declined", el("ul", { class: "reasons" }, declined.map(({ first: e, count, sum }) =>
      el("li", { class: "declined" }, link(`${graph.kernels[e.from].number} → ${graph.kernels[e.to].number}`, () => app.choose({ what: "edges", edges: [e], state: "declined" })),
        el("span", { class: "quiet" }, ` ${labelOf(graph, e.producer)}, ${bytesText(sum)} `), times(count), el("p", {}, cut(e.reason, 160)))))) : null,
    section("Legend", el("div", { class: "legend" }, families.map(tag)),
      el("ul", { class: "strokes" },
        el("li", {}, stroke("fused"), "fused: one kernel computes both nodes"),
        el("li", {}, stroke("declined"), "not fused, with a reason: click the line"),
        el("li", {}, stroke("flow"), "in memory: read as it lies there"))));
}

/**
 * Groups rows of the same key, the largest sums first.
 * @template T @param {T[]} rows @param {(row: T) => string} key @param {(row: T) => number} value
 * @returns {{first: T, count: number, sum: number}[]}
 */
function alike(rows, key, value) {
  const found = new Map();
  for (const row of rows) {
    const group = found.get(key(row)) ?? { first: row, count: 0, sum: 0 };
    found.set(key(row), group);
    group.count += 1;
    group.sum += value(row);
  }
  return [...found.values()].sort((a, b) => b.sum - a.sum);
}

/** @param {string} state */
const stroke = (state) => svg("svg", { class: "sample", width: 40, height: 12, "aria-hidden": "true" },
  svg("g", { class: `link ${state}` }, svg("path", { class: "stroke", d: "M2 6H38" })));

/** Declined lines between kernels, the costliest first. @param {Graph} graph */
const costlyDeclined = (graph) => graph.between.filter((e) => e.state === "declined").sort((a, b) => b.bytes - a.bytes);
