// @ts-check
// Elements, and numbers as text.  What users named reaches the page only as text nodes and attributes.

/**
 * @typedef {{name: string, shape: number[], strides: number[], dtype: string, bytes: number}} Tensor
 * @typedef {{name: string, op: string, scope: string, place: string, names: string[], parts: string[], shape: number[],
 *   dtype: string, output: boolean, kernel: number|null, state: string, made?: boolean}} Item
 * @typedef {{number: number, name: string, family: string, grid: number[], block: number[], chosen_by: string,
 *   dynamic_shared_bytes: number, declined_forms: Object<string, string>, bytes_saved: number, reads: Tensor[],
 *   writes: Tensor[], parts: string[], schedule: string, bytes: number, operations: number, memory_us: number,
 *   compute_us: number, floor_us: number, estimated_us: number, measured_us: number|null, start_us?: number,
 *   profiled?: boolean, rows: number[], source: number, owners: (number|null)[]}} Kernel
 * @typedef {{from: number, to: number, tensor: string, bytes: number, reason: string, saved: number}} Inner
 * @typedef {{from: number, to: number, tensor: string, bytes: number, producer: string, state: string,
 *   reason: string}} Outer
 * @typedef {{producer: string, consumer: string, fused: boolean, reason: string, bytes_saved: number,
 *   shared_input: string|null}} Decision
 * @typedef {{cards: [string, number, number, number, number][], routes: [number, number, number[]][],
 *   size: [number, number]}} Layout
 * @typedef {{name: string, summary: string, after: number[]|null, decisions: Decision[]}} Step
 * @typedef {{name: string, bytes: number, offset: number, born: number, dies: number}} Placed
 * @typedef {{name: string, inputs: Tensor[], outputs: Tensor[], parameters: number, items: Item[],
 *   kernels: Kernel[], within: Inner[], between: Outer[], repeats: [number, number, number][],
 *   passes: {lines: string[], built: number[], steps: Step[]}, decisions: Decision[],
 *   choices: {what: string, node: string, taken: string, estimated_us: Object<string, number|null>,
 *     measured_us: Object<string, number>}[],
 *   algorithms: {node: string, algorithm: string, reason: string}[],
 *   pruned: {node: string, removed: number|null}[],
 *   packed: {name: string, bytes: number, of: string[]}[], nodes_built: number, bytes_unfused: number,
 *   bytes_moved: number, memory: {workspace_bytes: number, tensors: Placed[], alive: number[]}}} Graph
 * @typedef {{name: string, code: string, marks: number[], lines: Object<string, number[]>, registers?: number,
 *   spill_bytes?: number, shared_bytes?: number}} Source
 * @typedef {{heads: string[], rows: (string|number|null)[][], title: string, text: string}} Table
 * @typedef {{title: string, version: string, graphs: Graph[], sources: Source[], classes: string[],
 *   layouts: {all: Layout, folded: Layout|null}[], left: {name: string, op: string, reason: string}[],
 *   target: {name: string, title: string, bytes_per_us: number, launch_us: number, tensor_per_us: number,
 *     threads_per_us: number}, differences?: {title: string, tables: Table[]}}} Facts
 */

/**
 * Makes an element: attributes by name ("on..." are listeners), then children, of which texts become text nodes.
 * @param {string} tag @param {Object<string, any>} [attributes] @param {...any} children
 * @returns {HTMLElement}
 */
function el(tag, attributes = {}, ...children) {
  return /** @type {HTMLElement} */ (filled(document.createElement(tag), attributes, children));
}

/**
 * Makes an element of SVG, as `el` does.
 * @param {string} tag @param {Object<string, any>} [attributes] @param {...any} children
 * @returns {SVGElement}
 */
function svg(tag, attributes = {}, ...children) {
  return /** @type {SVGElement} */ (filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children));
}

/** @param {Element} made @param {Object<string, any>} attributes @param {any[]} children */
function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || (value === false && !name.startsWith("aria-"))) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true && !name.startsWith("aria-") ? "" : String(value));
  }
  made.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

/** @param {string} id @returns {HTMLElement} */
function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`no element ${id}`);
  return found;
}

/** @param {number} value @param {string[]} units */
function scaled(value, units) {
  let at = 0;
  while (Math.abs(value) >= 999.5 && at + 1 < units.length) [value, at] = [value / 1000, at + 1];
  const digits = at === 0 && Number.isInteger(value) ? 0 : Math.abs(value) < 9.95 ? 2 : Math.abs(value) < 99.5 ? 1 : 0;
  return `${value.toFixed(digits)} ${units[at]}`;
}

/** @param {number} n */
const bytesText = (n) => scaled(n, ["B", "kB", "MB", "GB", "TB"]);
/** @param {number} n */
const timeText = (n) => scaled(n, ["µs", "ms", "s"]);
/** @param {number} n */
const opsText = (n) => scaled(n, ["op", "kop", "Mop", "Gop", "Top"]);
/** @param {number} n @param {string} noun */
const countText = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
/** @param {number} n */
const shareText = (n) => `${(100 * n).toFixed(n < 0.0995 ? 1 : 0)}%`;
/** @param {{shape: number[], dtype: string}} t */
const typeText = (t) => `${t.dtype} [${t.shape.join(", ")}]`;
/** @param {string} text @param {number} most */
const cut = (text, most) => (text.length <= most ? text : `${text.slice(0, most - 1)}…`);

/** Families of kernels -> the number of their colour. @type {Object<string, number>} */
const FAMILIES = {
  contraction: 0, attention: 1, rows: 2, pointwise: 3, pool: 4, attention_backward: 5, direct_convolution: 6,
  winograd: 7, scan: 8, sort: 8, scatter: 9, filter_gradient: 7,
};
/** @param {string} family */
const colour = (family) => `var(--family-${FAMILIES[family] ?? 9})`;

/** The time of a kernel: measured if that is known. @param {Kernel} k */
const timeOf = (k) => k.measured_us ?? k.estimated_us;
/** @param {Graph} graph */
const total = (graph) => graph.kernels.reduce((sum, k) => sum + timeOf(k), 0);
/** @param {Graph} graph */
const isMeasured = (graph) => graph.kernels.length > 0 && graph.kernels.every((k) => k.measured_us !== null);
