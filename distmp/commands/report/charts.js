"use strict";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 220, LEFT = 64, RIGHT = 12, TOP = 10, BOTTOM = 26;
const COLORS = ["var(--first)", "var(--second)", "var(--third)", "var(--fourth)"];

function element(name, attributes, parent, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
}

function html(name, className, parent, text) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  parent.appendChild(node);
  return node;
}

/* The validation loss and the marks of a run have other colors than its line. Numbered lines have
   hues that are far apart. */
function color(series) {
  if (series.number !== undefined) return `hsl(${(205 + 137.5 * series.number) % 360} 65% 48%)`;
  return COLORS[series.run + (series.kind === "dots" || series.kind === "marks" ? 2 : 0)];
}

function number(value) {
  if (value === null || value === undefined) return "-";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return String(Number(value.toPrecision(5)));
}

function short(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-2) return value.toExponential(1).replace(".0e", "e");
  for (const [limit, prefix] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= limit) return `${Number((value / limit).toPrecision(3))}${prefix}`;
  }
  return String(Number(value.toPrecision(3)));
}

function extent(chart) {
  let xs = [Infinity, -Infinity], ys = [Infinity, -Infinity];
  for (const series of chart.series) {
    series.y.forEach((y, i) => {
      xs = [Math.min(xs[0], series.x[i]), Math.max(xs[1], series.x[i])];
      if (y !== null) ys = [Math.min(ys[0], y), Math.max(ys[1], y)];
    });
  }
  return [xs, ys];
}

function linearTicks(low, high, most) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
  return ticks;
}

function yAxis(range, base) {
  let [low, high] = range;
  if (!isFinite(low)) return null;
  if (base && low > 0) {
    const log = (v) => Math.log(v) / Math.log(base);
    let from = Math.floor(log(low) + 1e-9), to = Math.ceil(log(high) - 1e-9);
    if (from === to) { from -= 1; to += 1; }
    const every = Math.max(1, Math.ceil((to - from) / 6)), ticks = [];
    for (let p = from; p <= to; p += every) ticks.push(base ** p);
    return { place: (v) => (log(v) - from) / (to - from), ticks };
  }
  if (low === high) { const pad = Math.abs(low) * 0.1 || 1; if (low !== 0) low -= pad; high += pad; }
  const pad = (high - low) * 0.04;
  const from = low >= 0 && low - pad < 0 ? 0 : low - pad, to = high + pad;
  return { place: (v) => (v - from) / (to - from), ticks: linearTicks(from, to, 5) };
}

function path(series, px, py) {
  let text = "", pen = false;
  series.y.forEach((y, i) => {
    if (y !== null) text += `${pen ? "L" : "M"}${px(series.x[i]).toFixed(1)} ${py(y).toFixed(1)}`;
    pen = y !== null;
  });
  return text;
}

function drawSeries(svg, chart, series, px, py) {
  if (series.kind === "dots") {
    series.y.forEach((y, i) => {
      if (y !== null) element("circle", { cx: px(series.x[i]), cy: py(y), r: 3, fill: color(series) }, svg);
    });
  } else if (series.kind === "marks") {
    for (const x of series.x) {
      const at = { x1: px(x), x2: px(x), y1: HEIGHT - BOTTOM - 14, y2: HEIGHT - BOTTOM };
      element("line", { ...at, stroke: color(series), "stroke-width": 1.5 }, svg);
    }
  } else {
    const smoothed = chart.series.some((other) => other.run === series.run && other.kind === "smooth");
    const under = series.kind === "line" && smoothed ? " under" : "";
    const dashes = series.number !== undefined && series.run ? { "stroke-dasharray": "5 3" } : {};
    element("path", { d: path(series, px, py), class: series.kind + under, stroke: color(series), ...dashes }, svg);
    if (series.x.length <= 50) {
      series.y.forEach((y, i) => {
        if (y !== null) element("circle", { cx: px(series.x[i]), cy: py(y), r: 2, fill: color(series) }, svg);
      });
    }
  }
}

/* The last point at or before a step; -1 before the first. */
function indexAt(xs, x) {
  let low = 0, high = xs.length;
  while (low < high) { const mid = (low + high) >> 1; if (xs[mid] <= x) low = mid + 1; else high = mid; }
  return low - 1;
}

function follow(figure, svg, chart, xs, px, width) {
  const cursor = element("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" }, svg);
  const tip = html("div", "tip", figure);
  tip.hidden = true;
  const leave = () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); };
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("pointermove", (event) => {
    const at = event.clientX - svg.getBoundingClientRect().left;
    const share = Math.min(1, Math.max(0, (at - LEFT) / (width - LEFT - RIGHT)));
    const step = Math.round(xs[0] + share * (xs[1] - xs[0]));
    const lines = [`step ${step}`];
    for (const series of chart.series) {
      const i = indexAt(series.x, step);
      if (series.kind === "marks") { if (i >= 0 && series.x[i] === step) lines.push(series.mark); continue; }
      if (i >= 0) lines.push(`${series.label}: ${number(series.y[i])} ${chart.unit}`);
    }
    tip.replaceChildren();
    lines.forEach((line) => html("div", "", tip, line));
    tip.hidden = false;
    const x = px(step);
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.setAttribute("visibility", "visible");
    const tipLeft = x + 10 + tip.offsetWidth <= width ? x + 10 : x - 10 - tip.offsetWidth;
    tip.style.left = `${Math.max(0, tipLeft)}px`;
  });
}

function draw(figure, chart) {
  figure.replaceChildren();
  const unit = chart.unit ? `, ${chart.unit}` : "";
  html("figcaption", "", figure, chart.title + unit);
  const width = figure.clientWidth;
  const [xs, range] = extent(chart), axis = yAxis(range, chart.logarithm);
  if (!axis) { html("p", "", figure, "Nothing finite to draw."); return; }
  const svg = element("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img", "aria-label": chart.title });
  figure.appendChild(svg);
  if (xs[0] === xs[1]) xs[1] += 1;
  const px = (x) => LEFT + ((x - xs[0]) / (xs[1] - xs[0])) * (width - LEFT - RIGHT);
  const py = (y) => HEIGHT - BOTTOM - axis.place(y) * (HEIGHT - TOP - BOTTOM);
  for (const tick of axis.ticks) {
    element("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: py(tick), y2: py(tick) }, svg);
    const label = chart.logarithm === 2 && tick >= 1024 ? `2^${Math.round(Math.log2(tick))}` : short(tick);
    element("text", { x: LEFT - 8, y: py(tick) + 4, "text-anchor": "end" }, svg, label);
  }
  for (const tick of linearTicks(xs[0], xs[1], Math.max(2, Math.floor(width / 120)))) {
    if (!Number.isInteger(tick)) continue;
    element("text", { x: px(tick), y: HEIGHT - 6, "text-anchor": "middle" }, svg, short(tick));
  }
  for (const series of chart.series) drawSeries(svg, chart, series, px, py);
  if (chart.series.length > 1) {
    const legend = html("div", "legend", figure);
    for (const series of chart.series) {
      html("span", "", legend, series.label).style.setProperty("--color", color(series));
    }
  }
  follow(figure, svg, chart, xs, px, width);
}

const data = JSON.parse(document.getElementById("charts").textContent);
const figures = [...document.querySelectorAll("[data-chart]")];
let drawn = 0;
function drawAll() {
  if (figures[0].clientWidth === drawn) return;
  drawn = figures[0].clientWidth;
  figures.forEach((figure) => draw(figure, data[Number(figure.dataset.chart)]));
}
new ResizeObserver(drawAll).observe(document.querySelector("main"));
drawAll();
