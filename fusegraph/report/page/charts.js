// @ts-check
// Charts: times beside the limits of the machine, kernels over time, memory over kernels.

/** @param {number} low @param {number} high */
function decades(low, high) {
  const found = [];
  for (let n = Math.floor(Math.log10(low)); n <= Math.ceil(Math.log10(high)); n++) found.push(10 ** n);
  return found;
}

/** Operations a second over operations a byte, both in powers of ten. @param {App} app */
function roofline(app) {
  const { graph, report } = app;
  const { target } = report;
  const points = graph.kernels.filter((k) => k.operations && k.bytes).map((k) => ({ k, x: k.operations / k.bytes, y: k.operations / timeOf(k) }));
  if (!points.length) return el("p", { class: "quiet" }, "No kernel of this graph computes anything.");
  const [w, h, left, below] = [920, 440, 70, 44];
  const xs = points.map((p) => p.x), ys = points.map((p) => p.y);
  const [x0, x1] = [Math.min(...xs, 0.1), Math.max(...xs, 1000)].map(Math.log10);
  const [y0, y1] = [Math.min(...ys, target.threads_per_us / 1000), target.tensor_per_us * 1.6].map(Math.log10);
  const px = (/** @type {number} */ v) => left + ((Math.log10(v) - x0) / (x1 - x0)) * (w - left - 20);
  const py = (/** @type {number} */ v) => h - below - ((Math.log10(v) - y0) / (y1 - y0)) * (h - below - 16);
  const ridge = (/** @type {number} */ peak) => peak / target.bytes_per_us;
  const roof = (/** @type {number} */ peak, /** @type {string} */ name) => {
    const x = Math.max(10 ** x0, ridge(peak));
    return svg("g", { class: "roof" },
      svg("path", { d: `M${px(x)} ${py(peak)}H${w - 20}` }),
      svg("text", { x: w - 24, y: py(peak) - 6, class: "end" }, `${name}: ${scaled(peak * 1e6, ["op/s", "kop/s", "Mop/s", "Gop/s", "Top/s", "Pop/s"])}`));
  };
  const start = Math.max(10 ** x0, 10 ** y0 / target.bytes_per_us), end = ridge(target.tensor_per_us);
  const most = Math.max(...points.map((p) => timeOf(p.k)));
  return svg("svg", { class: "chart", viewBox: `0 0 ${w} ${h}`, role: "img", "aria-label": "Roofline: operations a second of each kernel over its operations a byte. The table of kernels has the numbers." },
    decades(10 ** x0, 10 ** x1).filter((v) => Math.log10(v) >= x0 - 1e-9 && Math.log10(v) <= x1 + 1e-9).map((v) => svg("g", { class: "grid" },
      svg("path", { d: `M${px(v)} 16V${h - below}` }), svg("text", { x: px(v), y: h - below + 16, class: "mid" }, v.toPrecision(1).includes("e") ? v.toFixed(0) : String(Number(v.toPrecision(1)))))),
    decades(10 ** y0, 10 ** y1).filter((v) => Math.log10(v) >= y0 && Math.log10(v) <= y1).map((v) => svg("g", { class: "grid" },
      svg("path", { d: `M${left} ${py(v)}H${w - 20}` }), svg("text", { x: left - 6, y: py(v) + 4, class: "end" }, scaled(v * 1e6, ["", "k", "M", "G", "T", "P"])))),
    svg("text", { x: (left + w) / 2, y: h - 8, class: "mid axis" }, "operations a byte"),
    svg("text", { x: 16, y: 12, class: "axis" }, "operations a second"),
    svg("g", { class: "roof" }, svg("path", { d: `M${px(start)} ${py(start * target.bytes_per_us)}L${px(end)} ${py(target.tensor_per_us)}` })),
    roof(target.tensor_per_us, "tensor cores, 16 bits"), roof(target.threads_per_us, "float32 by threads"),
    points.sort((a, b) => timeOf(b.k) - timeOf(a.k)).map(({ k, x, y }) => svg("circle", {
      class: `point${k.measured_us === null ? " guess" : ""}`, cx: px(x), cy: py(y), r: 4 + 12 * Math.sqrt(timeOf(k) / most), style: `--family: ${colour(k.family)}`, "data-kernel": k.number - 1,
      onclick: () => app.choose({ what: "kernel", number: k.number - 1 }),
    }, svg("title", {}, `kernel ${k.number}, ${k.family}: ${x.toFixed(1)} operations a byte, ${scaled(y * 1e6, ["op/s", "kop/s", "Mop/s", "Gop/s", "Top/s", "Pop/s"])}, ${timeText(timeOf(k))}`))));
}

/** Kernels as they run, one after the other; what they take at least is full, the rest pale. @param {App} app */
function timeline(app) {
  const { graph } = app;
  const begin = (/** @type {Kernel} */ k, /** @type {number} */ at) => k.start_us ?? at;
  let at = 0;
  const spans = graph.kernels.map((k) => {
    const span = { k, from: begin(k, at), time: timeOf(k) };
    at = span.from + span.time;
    return span;
  });
  const [first, last] = [Math.min(...spans.map((s) => s.from), 0), Math.max(...spans.map((s) => s.from + s.time), 1e-9)];
  const w = 1200, px = (/** @type {number} */ t) => ((t - first) / (last - first)) * w;
  const chart = svg("svg", { class: "chart strip", viewBox: `0 0 ${w} 76`, preserveAspectRatio: "none", role: "img", "aria-label": `Timeline of ${countText(graph.kernels.length, "kernel")}, ${timeText(last - first)} in all` },
    spans.map(({ k, from, time }) => svg("g", { class: "span", style: `--family: ${colour(k.family)}`, onclick: () => app.choose({ what: "kernel", number: k.number - 1 }) },
      svg("rect", { class: "took", x: px(from), y: 4, width: Math.max(0.6, px(from + time) - px(from) - 0.5), height: 68 }),
      svg("rect", { class: "least", x: px(from), y: 4 + 68 * (1 - Math.min(1, k.floor_us / time)), width: Math.max(0.6, px(from + time) - px(from) - 0.5), height: 68 * Math.min(1, k.floor_us / time) }),
      svg("title", {}, `kernel ${k.number}, ${k.family}: ${timeText(time)}, floor ${timeText(k.floor_us)}`))));
  return el("div", {}, chart, el("div", { class: "scale" }, [0, 0.25, 0.5, 0.75, 1].map((n) => el("span", {}, timeText(first + n * (last - first))))));
}

/** What lies in the workspace, place over time. @param {App} app */
function memoryMap(app) {
  const { memory, kernels } = app.graph;
  if (!memory.tensors.length) return el("p", { class: "quiet" }, "No intermediate lies in memory: each kernel reads inputs and writes outputs.");
  const [w, h, left] = [1200, 360, 66], n = kernels.length, size = Math.max(memory.workspace_bytes, 1);
  const px = (/** @type {number} */ k) => left + (k / n) * (w - left), py = (/** @type {number} */ b) => h - 24 - (b / size) * (h - 40);
  const most = Math.max(...memory.alive), peak = memory.alive.indexOf(most);
  return el("div", {},
    el("p", {}, `${bytesText(memory.workspace_bytes)} of workspace. Most is alive while kernel ${peak + 1} runs: ${bytesText(most)}.`),
    svg("svg", { class: "chart memory", viewBox: `0 0 ${w} ${h}`, role: "img", "aria-label": "Memory map: each intermediate's place in the workspace while kernels run" },
      [0, 0.25, 0.5, 0.75, 1].map((s) => svg("g", { class: "grid" }, svg("path", { d: `M${left} ${py(s * size)}H${w}` }), svg("text", { x: left - 6, y: py(s * size) + 4, class: "end" }, bytesText(s * size)))),
      memory.tensors.map((t) => svg("rect", {
        class: "box", x: px(t.born), y: py(t.offset + t.bytes), width: Math.max(1.5, px(t.dies + 1) - px(t.born) - 1), height: Math.max(1, py(t.offset) - py(t.offset + t.bytes)), style: `--family: ${colour(kernels[t.born].family)}`,
        onclick: () => app.choose({ what: "kernel", number: t.born }),
      }, svg("title", {}, `${t.name}: ${bytesText(t.bytes)}, written by kernel ${t.born + 1}, last used by kernel ${t.dies + 1}`))),
      svg("path", { class: "alive", d: memory.alive.map((b, k) => `${k ? "L" : "M"}${px(k)} ${py(b)}L${px(k + 1)} ${py(b)}`).join("") }),
      svg("text", { x: (left + w) / 2, y: h - 4, class: "mid axis" }, `kernels 1 to ${n}`)),
    el("p", { class: "quiet" }, "A box is an intermediate: how high it lies in the workspace, and from which kernel to which it is needed. The line is what is alive."));
}
