"use strict";
const { runs, figures } = JSON.parse(document.getElementById("data").textContent);
const plots = figures.map((_, i) => document.getElementById("plot" + i));
const $ = (id) => document.getElementById(id);

// What the reader has chosen. A live page reloads itself, and keeps it.
const KEY = "report " + location.pathname;
const state = { x: "step", smooth: 0, range: null, runs: [], labels: [] };
try { Object.assign(state, JSON.parse(sessionStorage.getItem(KEY))); } catch { /* storage is off */ }
const save = () => { try { sessionStorage.setItem(KEY, JSON.stringify(state)); } catch { /* storage is off */ } };

// --- steps to tokens or time, and smoothing ---

const longest = Math.max(...runs.map((run) => (run.time.length ? run.time[run.time.length - 1] : 0)));
const [unit, unitSeconds] = longest > 5400 ? ["hours", 3600] : longest > 90 ? ["minutes", 60] : ["seconds", 1];
const titles = { step: "step", tokens: "tokens", time: `${unit} of training` };

function converted(run, step) {
  if (state.x === "step") return step;
  const { steps, [state.x]: values } = run;
  if (!values.length) return null;
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle; else high = middle;
  }
  const part = steps[high] > steps[low] ? (step - steps[low]) / (steps[high] - steps[low]) : 1;
  const value = values[low] + Math.max(part, 0) * (values[high] - values[low]);
  return state.x === "time" ? value / unitSeconds : value;
}

// An exponential mean over the steps before. It does not depend on how many points are drawn.
function smoothed(trace, halfLife) {
  let sum = 0, weight = 0, last = 0;
  return trace.x.map((x, i) => {
    const y = (trace.mean || trace.y)[i];
    if (y === null) return null;
    const decay = 0.5 ** ((x - last) / halfLife);
    sum = sum * decay + y;
    weight = weight * decay + 1;
    last = x;
    return sum / weight;
  });
}

// --- drawing ---

const allSteps = runs.flatMap((run) => [run.steps[0], run.steps[run.steps.length - 1]]);
const spanOf = (values) => [Math.min(...values), Math.max(...values)];
const [firstStep, lastStep] = spanOf(allSteps);

function fullRange() {
  const ends = figures.flatMap((figure) => figure.traces.flatMap((trace) =>
    [trace.x[0], trace.x[trace.x.length - 1]].map((step) => converted(runs[trace.run], step))));
  const [low, high] = spanOf(ends.filter((end) => end !== null));
  const pad = 0.02 * (high - low) || 0.5;
  return [low - pad, high + pad];
}

function tracesOf(figure, number) {
  return figure.traces.flatMap((trace) => {
    const run = runs[trace.run];
    const visible = !state.runs.includes(trace.run) && !state.labels.includes(`${number} ${trace.label}`);
    const x = trace.x.map((step) => converted(run, step));
    const line = { color: trace.color, dash: trace.dash, width: trace.width };
    const drawn = {
      x, y: trace.y, name: trace.name, visible, line, type: "scatter", mode: x.length < 40 ? "lines+markers" : "lines",
      marker: { size: 5, color: trace.color }, hovertemplate: `%{y:${figure.format}}`,
    };
    if (trace.errors) drawn.error_y = { type: "data", array: trace.errors, color: trace.color, thickness: 1.2, width: 3 };
    const found = [drawn];
    if (trace.smooth && state.smooth) {
      const y = smoothed(trace, state.smooth / 100 * Math.max(lastStep - firstStep, 1));
      found.unshift({ ...drawn, opacity: 0.3, hoverinfo: "skip", hovertemplate: undefined, mode: "lines" });
      Object.assign(drawn, { y, mode: "lines", line: { ...line, width: 1.8 } });
    }
    if (trace.leaves) {
      const limit = figure.axis.range[1];
      found.push({
        x: trace.leaves.map((step) => converted(run, step)), y: trace.leaves.map(() => limit), visible, type: "scatter",
        mode: "markers", marker: { symbol: "triangle-up", size: 9, color: trace.color }, cliponaxis: false, hoverinfo: "skip",
      });
    }
    return found;
  });
}

function layoutOf(figure) {
  const style = getComputedStyle(document.documentElement);
  const [text, line, soft, panel] = ["--text", "--line", "--soft", "--panel"].map((name) => style.getPropertyValue(name).trim());
  const marks = runs.flatMap((run, i) => (state.runs.includes(i) ? [] : run.marks.map(([step, label]) =>
    ({ x: converted(run, step), label, color: run.color })))).filter((mark) => mark.x !== null);
  const levels = figure.levels || [];
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
  return {
    font: { color: text, family: "system-ui, sans-serif", size: 12 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 44, r: 12, t: 14, b: 36 },
    hovermode: "x unified", hoverlabel: { bgcolor: panel, font: { color: text }, namelength: -1 },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",  // a touch scrolls the page
    modebar: { bgcolor: "rgba(0,0,0,0)", color: line, activecolor: soft }, showlegend: false,
    shapes: [
      ...marks.map(({ x, color }) => ({
        type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { color, width: 1.2, dash: "dash" } })),
      ...levels.map(({ y }) => ({
        type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color: soft, width: 1.2, dash: "dot" } })),
    ],
    annotations: [
      ...marks.map(({ x, label, color }) => ({
        x, text: label, yref: "paper", y: 1, yanchor: "top", xanchor: "right", textangle: -90, showarrow: false,
        font: { size: 10, color } })),
      ...levels.map(({ y, text: label }) => ({
        y, text: label, xref: "paper", x: 0, xanchor: "left", yanchor: "bottom", showarrow: false,
        font: { size: 10, color: soft } })),
    ],
    xaxis: { ...axis, range: state.range || fullRange(), title: { text: titles[state.x], standoff: 6 } },
    yaxis: { ...axis, ...figure.axis },
  };
}

const config = {
  responsive: true, displaylogo: false, doubleClick: false, modeBarButtons: [["toImage", "zoom2d", "pan2d"]],
};
function draw() {
  save();
  $("span").textContent = state.smooth ? `${state.smooth} %` : "off";
  $("reset").hidden = !state.range;
  for (const button of document.querySelectorAll(".legend button")) {
    button.classList.toggle("off", button.dataset.run ? state.runs.includes(Number(button.dataset.run))
      : state.labels.includes(labelOf(button)));
  }
  return Promise.all(figures.map((figure, i) => Plotly.react(plots[i], tracesOf(figure, i), layoutOf(figure), config)));
}

// --- what the reader does ---

function toggled(list, value) {
  return list.includes(value) ? list.filter((other) => other !== value) : [...list, value];
}
function labelOf(button) {
  return `${button.closest("figure").querySelector(".plot").id.slice(4)} ${button.dataset.label}`;
}

$("x").value = state.x;
$("smooth").value = state.smooth;
for (const option of $("x").options) option.disabled = option.value !== "step" && !runs.some((run) => run[option.value].length);
document.querySelector("nav").hidden = false;
$("x").addEventListener("change", () => { Object.assign(state, { x: $("x").value, range: null }); draw(); });
$("smooth").addEventListener("input", () => { state.smooth = Number($("smooth").value); draw(); });
$("reset").addEventListener("click", () => { state.range = null; draw(); });
for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    if (button.dataset.run) state.runs = toggled(state.runs, Number(button.dataset.run));
    else state.labels = toggled(state.labels, labelOf(button));
    draw();
  });
}

// All figures zoom and hover together.
function link(plot) {
  const others = plots.filter((other) => other !== plot);
  plot.on("plotly_relayout", (change) => {
    if (!("xaxis.range[0]" in change)) return;
    state.range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    save();
    $("reset").hidden = false;
    for (const other of others) Plotly.relayout(other, { "xaxis.range": state.range });
  });
  plot.on("plotly_doubleclick", () => { state.range = null; draw(); });
  plot.on("plotly_hover", ({ xvals }) => { for (const other of others) Plotly.Fx.hover(other, { xval: xvals[0] }, "xy"); });
  plot.on("plotly_unhover", () => { for (const other of others) Plotly.Fx.unhover(other); });
}
draw().then(() => {
  plots.forEach(link);
  document.documentElement.dataset.drawn = figures.length;
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
