// Draws each chart with Observable Plot in the page's own colours, as wide as its place.
"use strict";
(() => {
  const points = (s) => s.x.map((x, i) => ({ x, y: s.y[i], name: s.name, note: s.notes[i] || "" }));
  const words = (chart, d) => `${d.name}\n${chart.x.title} ${d3.format(".4~g")(d.x)}\n${d3.format(".4~g")(d.y)} ${chart.y.title}${d.note ? "\n" + d.note : ""}`;
  const draw = (target, chart) => {
    const shown = chart.series.filter((s) => !s.of && s.x.length);
    const data = shown.flatMap(points);
    const marks = [Plot.gridY({ stroke: "var(--line)", strokeOpacity: 1 })];
    for (const s of chart.series) {
      const line = { x: "x", y: "y", stroke: s.colour, strokeWidth: s.of ? 1.2 : 2 };
      if (s.kind === "points") marks.push(Plot.dot(points(s), { x: "x", y: "y", fill: s.colour, r: 2.6 }));
      else marks.push(Plot.line(points(s), s.kind === "steps" ? { ...line, curve: "step-after" } : line));
    }
    for (const l of chart.levels) {
      // A level's words stand at its right end, on the side with fewer points.
      const ends = data.slice(-Math.ceil(data.length / 3));
      const dy = ends.filter((d) => d.y > l.value).length * 2 > ends.length ? 11 : -8;
      marks.push(Plot.ruleY([l.value], { stroke: l.colour, strokeWidth: 1.6, strokeDasharray: "6 4" }));
      marks.push(Plot.text([l.value], { y: (d) => d, frameAnchor: "right", dy, text: () => l.text, fill: l.colour, textAnchor: "end", stroke: "var(--card)", strokeWidth: 4 }));
    }
    marks.push(Plot.tip(data, Plot.pointer({
      x: "x", y: "y", fill: "var(--card)", stroke: "var(--line)", maxRadius: 60,
      title: (d) => words(chart, d),
    })));
    const axis = (a) => ({ label: a.title, type: a.logarithmic ? "log" : "linear", tickFormat: a.logarithmic ? "~s" : undefined });
    const plot = Plot.plot({
      width: Math.max(target.clientWidth, 260), height: 320, marginLeft: 56, marginRight: 20, marks,
      x: { ...axis(chart.x), nice: !chart.x.logarithmic },
      y: { ...axis(chart.y), ...(chart.y.span ? { domain: chart.y.span } : chart.y.logarithmic ? {} : { zero: true }) },
      color: shown.length > 1 ? { legend: true, domain: shown.map((s) => s.name), range: shown.map((s) => s.colour) } : undefined,
      style: { background: "transparent", color: "var(--ink)", fontSize: "12px" },
      ariaLabel: target.getAttribute("aria-label"),
    });
    target.replaceChildren(plot);
    reach(target, plot.matches("svg") ? plot : plot.querySelector("svg[viewBox]:last-of-type"), data, plot, chart);
  };
  const said = document.body.appendChild(Object.assign(document.createElement("p"), { className: "sr", role: "status" }));
  // The arrow keys step through the points, as the pointer would, and say them; touch is a pointer already.
  const reach = (target, svg, data, plot, chart) => {
    const at = [...data].sort((a, b) => a.x - b.x);
    let index = -1;
    target.tabIndex = 0;
    target.onkeydown = (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step || !at.length) return;
      event.preventDefault();
      index = (index + step + at.length) % at.length;
      const box = svg.getBoundingClientRect();
      const ratio = box.width / svg.viewBox.baseVal.width;
      const place = (name, value) => plot.scale(name).apply(value) * ratio;
      svg.dispatchEvent(new PointerEvent("pointermove", { bubbles: true, pointerType: "mouse", clientX: box.left + place("x", at[index].x), clientY: box.top + place("y", at[index].y) }));
      said.textContent = words(chart, at[index]);
    };
    target.onblur = () => svg.dispatchEvent(new PointerEvent("pointerleave"));
  };
  for (const source of document.querySelectorAll('script[id^="figure-"]')) {
    const target = document.getElementById(source.id.replace("figure-", "chart-"));
    const chart = JSON.parse(source.textContent);
    let width = target.clientWidth;
    draw(target, chart);
    new ResizeObserver(() => {
      if (target.clientWidth === width) return;
      width = target.clientWidth;
      requestAnimationFrame(() => draw(target, chart));
    }).observe(target);
  }
})();
