// Draws each figure in the page's own colours, again whenever the theme or the medium changes.
"use strict";
(() => {
  const config = { responsive: true, displayModeBar: false };
  const colour = (_, name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const draw = () => {
    for (const source of document.querySelectorAll('script[id^="figure-"]')) {
      const target = document.getElementById(source.id.replace("figure-", "chart-"));
      const figure = JSON.parse(source.textContent.replace(/var\((--[\w-]+)\)/g, colour));
      Plotly.react(target, figure.data, figure.layout, config);
    }
  };
  // A chart keeps the size it has on screen; with a viewBox it scales to the paper instead.
  const scale = (svg) => svg.setAttribute("viewBox", `0 0 ${svg.width.baseVal.value} ${svg.height.baseVal.value}`);
  const charts = () => document.querySelectorAll(".chart .main-svg");
  addEventListener("beforeprint", () => charts().forEach(scale));
  addEventListener("afterprint", () => charts().forEach((svg) => svg.removeAttribute("viewBox")));
  draw();
  for (const query of ["(prefers-color-scheme: dark)", "print"]) {
    matchMedia(query).addEventListener("change", draw);
  }
})();
