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
