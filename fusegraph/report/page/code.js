// @ts-check
// CUDA C with colours, line numbers, and lines that know their nodes.

/**
 * Returns a block of code.  A click on a line calls `onLine` with the positions of its nodes.
 * @param {Source} source @param {string[]} classes @param {(parts: number[], line: number) => void} onLine
 */
function codeBlock(source, classes, onLine) {
  const body = el("div", { class: "code", role: "group", "aria-label": `CUDA C of ${source.name}`, tabindex: 0 });
  let number = 0;
  let line = el("span");
  const begin = () => {
    number += 1;
    const parts = source.lines[String(number)];
    const at = number;
    line = el("span", { class: "text" });
    const known = parts ? { tabindex: -1, role: "button", "data-parts": parts.join(" "), title: "Show its nodes" } : {};
    body.append(
      el("div", {
        class: parts ? "line known" : "line", "data-line": at, ...known,
        onclick: parts ? () => onLine(parts, at) : null,
        onkeydown: parts ? (/** @type {KeyboardEvent} */ e) => e.key === "Enter" && onLine(parts, at) : null,
      }, line)
    );
  };
  begin();
  let at = 0;
  for (let n = 0; n < source.marks.length; n += 2) {
    const text = source.code.slice(at, at + source.marks[n]);
    at += source.marks[n];
    text.split("\n").forEach((part, index) => {
      if (index) begin();
      const kind = classes[source.marks[n + 1]];
      if (part) line.append(kind ? el("span", { class: kind }, part) : part);
    });
  }
  if (!line.textContent) body.lastElementChild?.remove();
  return body;
}

/** Marks the lines of some nodes of a kernel, and shows the first. @param {HTMLElement} block @param {number[]} parts */
function markLines(block, parts) {
  /** @type {HTMLElement|null} */
  let first = null;
  for (const line of /** @type {NodeListOf<HTMLElement>} */ (block.querySelectorAll(".line.known"))) {
    const its = (line.dataset.parts ?? "").split(" ").map(Number);
    const here = its.some((part) => parts.includes(part));
    line.classList.toggle("marked", here);
    if (here && !first) first = line;
  }
  return first;
}
