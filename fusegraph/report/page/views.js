// @ts-check
// The views: the graph, tables of kernels and of declined fusions, passes, charts, differences.

/**
 * Returns a table that a click on a heading sorts.
 * @param {string} name @param {{head: string, of: (row: any) => any, show?: (value: any, row: any) => any, hint?: string}[]} columns
 * @param {any[]} rows @param {(row: any) => void} onRow
 */
function sortable(name, columns, rows, onRow) {
  const body = el("tbody");
  let by = -1, down = true;
  const fill = () => {
    const sorted = by < 0 ? rows : [...rows].sort((a, b) => {
      const [x, y] = [columns[by].of(a) ?? -Infinity, columns[by].of(b) ?? -Infinity];
      return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
    });
    body.replaceChildren(...sorted.map((row) => el("tr", {
      tabindex: 0, class: "choice", onclick: () => onRow(row),
      onkeydown: (/** @type {KeyboardEvent} */ e) => e.key === "Enter" && onRow(row),
    }, columns.map((column) => {
      const value = column.of(row);
      return el("td", { class: typeof value === "number" ? "num" : "" }, value === null || value === undefined ? "–" : column.show ? column.show(value, row) : String(value));
    }))));
  };
  const heads = columns.map((column, at) => el("th", { scope: "col", "aria-sort": "none" }, el("button", {
    type: "button", title: column.hint ?? `sort by ${column.head}`, onclick: () => {
      down = by === at ? !down : true;
      by = at;
      heads.forEach((head, n) => head.setAttribute("aria-sort", n === at ? (down ? "descending" : "ascending") : "none"));
      fill();
    },
  }, column.head)));
  fill();
  return el("div", { class: "table-box", tabindex: 0, role: "region", "aria-label": name }, el("table", { class: "sortable" }, el("thead", {}, el("tr", {}, heads)), body));
}

/** @param {App} app */
function graphView(app) {
  const graph = app.view;
  if (!graph) return el("p", { class: "empty" }, "This graph has no kernels.");
  const fold = el("button", { type: "button", "aria-pressed": graph.folded, hidden: !graph.layouts.folded, onclick: () => graph.fold(!graph.folded) }, "Fold like layers");
  graph.onFold = (/** @type {boolean} */ folded) => fold.setAttribute("aria-pressed", String(folded));
  const tools = el("div", { class: "tools", role: "toolbar", "aria-label": "Graph" }, fold,
    el("button", { type: "button", "aria-label": "Zoom out", onclick: () => graph.zoom(0.8) }, "−"),
    el("button", { type: "button", "aria-label": "Zoom in", onclick: () => graph.zoom(1.25) }, "+"),
    el("button", { type: "button", onclick: () => graph.fit() }, "Fit"));
  return el("div", { class: "graph-box" }, graph.svg, tools, el("p", { class: "hint" }, "drag or scroll to move · Ctrl + scroll to zoom · / to search"));
}

/** @param {App} app */
function kernelsView(app) {
  const { graph, report } = app;
  const whole = Math.max(total(graph), 1e-9);
  return el("div", { class: "page" }, el("h2", {}, "Kernels"),
    el("p", { class: "quiet" }, `Times are ${isMeasured(graph) ? "measured" : "estimates of the cost model"}. The floor is what moving the bytes, or the arithmetic, takes at least on ${report.target.title}.`),
    sortable("Kernels", [
      { head: "#", of: (k) => k.number },
      { head: "kernel", of: (k) => k.name, show: (_, k) => [tag(k.family), " ", titleOf(graph, k)] },
      { head: "nodes", of: (k) => k.rows.length },
      { head: "time", of: timeOf, show: timeText },
      { head: "share", of: (k) => timeOf(k) / whole, show: (v, k) => el("span", { class: "meter", style: `--share: ${(100 * timeOf(k)) / Math.max(...graph.kernels.map(timeOf))}%; --family: ${colour(k.family)}` }, shareText(v)) },
      { head: "floor", of: (k) => k.floor_us, show: timeText },
      { head: "× floor", of: (k) => timeOf(k) / k.floor_us, show: (v) => v.toFixed(2), hint: "time over floor: 1 is as fast as the machine allows" },
      { head: "moves", of: (k) => k.bytes, show: bytesText },
      { head: "operations", of: (k) => k.operations, show: opsText },
      { head: "registers", of: (k) => report.sources[k.source].registers ?? null },
    ], graph.kernels, (k) => app.choose({ what: "kernel", number: k.number - 1 })),
    leftToTorch(app), packedTable(app));
}

/** @param {App} app */
const leftToTorch = (app) => app.report.left.length ? el("div", {}, el("h2", {}, "Left to torch"), el("table", { class: "plain" }, el("tbody", {}, app.report.left.map((l) =>
  el("tr", {}, el("th", { scope: "row" }, l.name), el("td", {}, l.op), el("td", {}, l.reason)))))) : null;

/** @param {App} app */
const packedTable = (app) => app.graph.packed.length ? el("div", {}, el("h2", {}, "Computed once, of parameters"), el("table", { class: "plain" }, el("tbody", {}, app.graph.packed.map((t) =>
  el("tr", {}, el("th", { scope: "row" }, t.name), el("td", { class: "num" }, bytesText(t.bytes)), el("td", {}, `of ${t.of.join(", ") || "constants"}`)))))) : null;

/** @param {App} app */
function decisionsView(app) {
  const { graph, report } = app;
  const rate = report.target.bytes_per_us;
  const counts = new Map();
  for (const d of graph.decisions) if (!d.fused) counts.set(d.reason, (counts.get(d.reason) ?? 0) + 1);
  const kernelOf = new Map(graph.kernels.flatMap((k, at) => k.parts.map((p) => [p.split(" = ")[0], at])));
  return el("div", { class: "page" }, el("h2", {}, "Fusions that were declined"),
    el("p", { class: "quiet" }, "What two kernels give each other in memory is written once and read once; a fusion would save that. The costliest come first."),
    sortable("Declined fusions", [
      { head: "kernels", of: (e) => e.from, show: (_, e) => `${e.from + 1} → ${e.to + 1}` },
      { head: "result of", of: (e) => labelOf(graph, e.producer), show: (v, e) => el("span", { title: e.tensor }, v) },
      { head: "bytes", of: (e) => e.bytes, show: bytesText },
      { head: "costs", of: (e) => (2 * e.bytes) / rate, show: timeText, hint: "to write and read it" },
      { head: "reason", of: (e) => e.reason },
    ], costlyDeclined(graph), (e) => app.choose({ what: "edges", edges: [e], state: "declined" })),
    el("h2", {}, "All decisions"),
    el("p", { class: "quiet" }, `${countText(graph.decisions.filter((d) => d.fused).length, "pair")} fused; ${[...counts.values()].reduce((a, b) => a + b, 0)} declined, for these reasons:`),
    el("div", {}, [...counts].sort((a, b) => b[1] - a[1]).map(([reason, count]) => el("details", { class: "group" }, el("summary", {}, el("b", {}, `${count} ×`), " ", reason),
      el("ul", {}, graph.decisions.filter((d) => !d.fused && d.reason === reason).map((d) => el("li", {}, kernelOf.has(d.producer)
        ? link(`${d.producer} ${d.shared_input ? "beside" : "→"} ${d.consumer}`, () => app.choose({ what: "kernel", number: kernelOf.get(d.producer) }))
        : `${d.producer} ${d.shared_input ? "beside" : "→"} ${d.consumer}`)))))),
    choicesOf(app));
}

/** What was weighed, alike ones together. @param {App} app */
function choicesOf(app) {
  const { graph } = app;
  const rows = [
    ...graph.choices.map((c) => ({ node: c.node, what: `${c.what}: ${c.taken}`, why: weighed(c) })),
    ...graph.algorithms.map((a) => ({ node: a.node, what: a.algorithm, why: a.reason })),
    ...graph.pruned.map((p) => ({ node: p.node, what: "two of every four neighbours are kept", why: lostText(p.removed) })),
  ];
  if (!rows.length) return null;
  return el("div", {}, el("h2", {}, "Choices"), alike(rows, (r) => `${r.what} ${r.why}`, () => 1).map(({ first, count }) =>
    el("details", { class: "group" }, el("summary", {}, el("b", {}, `${count} ×`), ` ${first.what}`, el("p", {}, first.why)),
      el("ul", {}, rows.filter((r) => r.what === first.what && r.why === first.why).map((r) => el("li", {}, labelOf(graph, r.node)))))));
}

/** @param {number|null} removed */
const lostText = (removed) => removed === null ? "what is lost depends on the values of a call" : `${(100 * removed).toFixed(1)} % of the norm is lost`;

/** @param {Graph["choices"][0]} choice */
const weighed = (choice) => Object.entries(choice.estimated_us).map(([name, us]) =>
  `${name}: ${choice.measured_us[name] === undefined ? (us === null ? "no estimate" : `${timeText(us)} estimated`) : `${timeText(choice.measured_us[name])} measured`}`).join("; ");

/** @param {App} app */
function passesView(app) {
  const { passes } = app.graph;
  let before = passes.built;
  const parts = passes.steps.map((step) => {
    const old = before, now = step.after ?? before;
    before = now;
    return passDetails(passes.lines, step, old, now);
  });
  const idle = passes.steps.filter((s) => !s.after && !s.decisions.length).map((s) => s.name);
  return el("div", { class: "page" }, el("h2", {}, "Pass by pass"),
    el("p", { class: "quiet" }, `${countText(passes.built.length, "node")} as built, ${countText(before.length, "node")} behind the last pass. Green lines are new, red ones are gone.`),
    parts, idle.length ? el("p", { class: "quiet" }, `Nothing to do for: ${idle.join(", ")}.`) : null);
}

/** @param {string[]} lines @param {Step} step @param {number[]} old @param {number[]} now */
function passDetails(lines, step, old, now) {
  if (!step.after && !step.decisions.length) return null;
  const [before, after] = [new Set(old), new Set(now)];
  const gone = old.filter((n) => !after.has(n)).length, fresh = now.filter((n) => !before.has(n)).length;
  const box = el("details", { class: "group pass" },
    el("summary", {}, el("b", {}, step.name), " ", el("span", { class: "minus" }, gone ? `−${gone}` : ""), " ", el("span", { class: "plus" }, fresh ? `+${fresh}` : ""),
      el("span", { class: "quiet" }, ` ${countText(now.length, "node")}${step.decisions.length ? `, ${countText(step.decisions.length, "decision")}` : ""}`), el("p", {}, step.summary)));
  box.addEventListener("toggle", () => {
    if (box.childElementCount > 1) return;
    if (step.decisions.length) box.append(el("ul", { class: "reasons" }, step.decisions.map((d) => el("li", { class: d.fused ? "fused" : "declined" }, el("b", {}, `${d.producer} → ${d.consumer}`), el("p", {}, d.reason)))));
    if (step.after) box.append(el("div", { class: "diff", role: "group", "aria-label": `The graph before and after ${step.name}`, tabindex: 0 }, unified(lines, old, now)));
  });
  return box;
}

/** Returns the lines of two graphs in one list, those that stayed folded away. @param {string[]} lines @param {number[]} old @param {number[]} now */
function unified(lines, old, now) {
  const after = new Set(now), before = new Set(old);
  /** @type {[string, number][]} */
  const rows = [];
  let at = 0;
  for (const n of now) {
    if (before.has(n)) {
      const place = old.indexOf(n, at);
      while (at < place) {
        if (!after.has(old[at])) rows.push(["minus", old[at]]);
        at += 1;
      }
      if (place >= 0) at = place + 1;
      rows.push(["same", n]);
    } else rows.push(["plus", n]);
  }
  for (; at < old.length; at++) if (!after.has(old[at])) rows.push(["minus", old[at]]);
  const near = rows.map((_, k) => rows.slice(Math.max(0, k - 2), k + 3).some(([kind]) => kind !== "same"));
  const result = [];
  for (let k = 0; k < rows.length; k++) {
    if (near[k]) result.push(el("div", { class: rows[k][0] }, `${{ plus: "+", minus: "−", same: " " }[rows[k][0]]} ${lines[rows[k][1]]}`));
    else if (k === 0 || near[k - 1]) {
      let end = k;
      while (end < rows.length && !near[end]) end += 1;
      const hidden = rows.slice(k, end);
      const more = el("button", { type: "button", class: "hidden-lines", onclick: () => more.replaceWith(...hidden.map(([, n]) => el("div", { class: "same" }, `  ${lines[n]}`))) }, `${countText(hidden.length, "node")} as before`);
      result.push(more);
    }
  }
  return result;
}

/** @param {App} app */
function timesView(app) {
  const { graph, report } = app;
  return el("div", { class: "page" }, el("h2", {}, "Timeline"),
    el("p", { class: "quiet" }, isMeasured(graph) ? "Measured. What is full is the floor." : "Estimated by the cost model: no profile was given. What is full is the floor."), timeline(app),
    el("h2", {}, "Roofline"), el("p", { class: "quiet" }, `${report.target.title}; circles are kernels, as large as their time${isMeasured(graph) ? "" : ", hollow as it is estimated"}.`), roofline(app));
}

/** @param {App} app */
const memoryView = (app) => el("div", { class: "page" }, el("h2", {}, "Memory over the kernels"), memoryMap(app));

/** @param {App} app */
function differencesView(app) {
  const found = app.report.differences;
  return el("div", { class: "page" }, found ? [el("h2", {}, found.title), found.tables.map((table) => el("div", {}, el("h3", {}, table.title), el("p", { class: "quiet" }, table.text),
    table.rows.length ? el("table", { class: "plain" }, el("thead", {}, el("tr", {}, table.heads.map((head) => el("th", { scope: "col" }, head)))),
      el("tbody", {}, table.rows.map((row) => el("tr", {}, row.map((cell) => el("td", {}, cell === null ? "–" : String(cell))))))) : null))] : null);
}
