// A slider shows one frame of its figure and hides the others.
"use strict";
for (const plot of document.querySelectorAll(".plot")) {
  const slider = plot.querySelector("input");
  if (!slider) continue;
  const frames = [...plot.querySelectorAll(".frame")];
  const show = () => {
    frames.forEach((frame, number) => { frame.hidden = number !== slider.valueAsNumber; });
    plot.querySelector("output").value = frames[slider.valueAsNumber].dataset.label;
  };
  slider.addEventListener("input", show);
  show();  // a browser may remember where the slider stood
}

// The marks of a picture whose words a mouse shows: one of them can be tabbed to, the arrow keys go on from there.
const marksOf = (picture) => [...picture.querySelectorAll("title, [title]")].map((one) => one.tagName === "title" ? one.parentNode : one);
function makeReachable(root) {
  for (const picture of root.querySelectorAll("svg, .bar")) {
    const marks = marksOf(picture);
    if (marks.length) picture.setAttribute("role", "group");  // an img would hide what is in it
    marks.forEach((mark, number) => { mark.setAttribute("role", "img"); mark.setAttribute("tabindex", number ? -1 : 0); });
  }
}
makeReachable(document);
const tip = document.body.appendChild(Object.assign(document.createElement("div"), { className: "tip", hidden: true, ariaHidden: "true" }));
const hideTip = () => { tip.hidden = true; };
function visit(mark) {
  for (const other of marksOf(mark.closest("svg, .bar"))) other.setAttribute("tabindex", other === mark ? 0 : -1);
  mark.focus();
}
document.addEventListener("focusin", ({ target }) => {
  hideTip();
  if (target.getAttribute("role") !== "img" || !target.closest("svg, .bar")) return;
  tip.textContent = target.querySelector("title")?.textContent ?? target.title;
  tip.hidden = false;
  const at = target.getBoundingClientRect(), most = document.documentElement.clientWidth - tip.offsetWidth - 8;
  tip.style.left = `${scrollX + Math.max(8, Math.min(at.left, most))}px`;
  tip.style.top = `${scrollY + at.bottom + 6}px`;
});
document.addEventListener("focusout", hideTip);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideTip();
  const picture = event.target.closest("svg, .bar"), step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!picture || !step) return;
  const marks = marksOf(picture);
  event.preventDefault();
  visit(marks[(marks.indexOf(event.target) + step + marks.length) % marks.length]);
});
// A finger is broader than a mark: the nearest within its breadth is meant.
document.addEventListener("click", (event) => {
  const picture = event.target.closest("svg, .bar");
  const off = (mark) => {
    const at = mark.getBoundingClientRect(), beyond = (value, low, high) => Math.max(low - value, 0, value - high);
    return Math.hypot(beyond(event.clientX, at.left, at.right), beyond(event.clientY, at.top, at.bottom));
  };
  const near = (picture ? marksOf(picture) : []).filter((mark) => off(mark) < 24).sort((a, b) => off(a) - off(b));
  if (near.length) visit(near[0]);
});
