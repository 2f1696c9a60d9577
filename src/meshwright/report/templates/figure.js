// Sliders choose frames; marks show their words by pointer, keyboard and touch.
for (const plot of document.querySelectorAll(".plot")) {
  const slider = plot.querySelector("input");
  if (!slider) continue;
  const frames = [...plot.querySelectorAll(".frame")];
  const show = () => {
    frames.forEach((frame, number) => { frame.hidden = number !== slider.valueAsNumber; });
    plot.querySelector("output").value = frames[slider.valueAsNumber].dataset.label;
  };
  slider.addEventListener("input", show);
  show();  // a browser may remember the position of the slider
}

// A picture has one mark in the order of tabs; the arrow keys go on to the others.
const marksOf = (picture) => [...picture.querySelectorAll("title")].map((title) => title.parentNode);
function makeReachable(root) {
  for (const picture of root.querySelectorAll("svg")) {
    const marks = marksOf(picture);
    if (!marks.length) continue;
    picture.setAttribute("role", "group");  // an img would hide its marks from a screen reader
    picture.classList.add("live");  // the browser's own tips would come late, and twice
    marks.forEach((mark, number) => { mark.setAttribute("role", "img"); mark.setAttribute("tabindex", number ? -1 : 0); });
  }
}
makeReachable(document);
const tip = document.body.appendChild(Object.assign(document.createElement("div"), { className: "tip", hidden: true, ariaHidden: "true" }));
const hideTip = () => { tip.hidden = true; };
function showTip(mark) {
  tip.textContent = mark.querySelector("title").textContent;
  tip.hidden = false;
  const at = mark.getBoundingClientRect(), most = document.documentElement.clientWidth - tip.offsetWidth - 8;
  tip.style.left = `${scrollX + Math.max(8, Math.min(at.left, most))}px`;
  tip.style.top = `${scrollY + at.bottom + 6}px`;
}
const isMark = (target) => target.getAttribute?.("role") === "img" && target.closest("svg.live");
document.addEventListener("focusin", ({ target }) => isMark(target) ? showTip(target) : hideTip());
document.addEventListener("focusout", hideTip);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideTip();
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!step || !isMark(event.target)) return;
  const marks = marksOf(event.target.closest("svg")), next = marks[(marks.indexOf(event.target) + step + marks.length) % marks.length];
  event.preventDefault();
  marks.forEach((mark) => mark.setAttribute("tabindex", mark === next ? 0 : -1));
  next.focus();
});
// The nearest mark within the breadth of a finger is meant; of those under the pointer the smallest.
function markNear(event) {
  const picture = event.target.closest?.("svg.live");
  const near = (picture ? marksOf(picture) : []).map((mark) => {
    const at = mark.getBoundingClientRect(), beyond = (value, low, high) => Math.max(low - value, 0, value - high);
    return { mark, off: Math.hypot(beyond(event.clientX, at.left, at.right), beyond(event.clientY, at.top, at.bottom)), size: at.width * at.height };
  });
  return near.filter(({ off }) => off < 24).sort((a, b) => a.off - b.off || a.size - b.size)[0]?.mark;
}
document.addEventListener("pointermove", (event) => {
  if (event.pointerType !== "mouse" || isMark(document.activeElement)) return;
  const mark = markNear(event);
  if (mark) showTip(mark);
  else hideTip();
});
document.addEventListener("click", (event) => {
  const mark = markNear(event);
  if (!mark) return;
  for (const other of marksOf(mark.closest("svg"))) other.setAttribute("tabindex", other === mark ? 0 : -1);
  mark.focus();
});
