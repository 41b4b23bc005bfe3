"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");

function layoutOf(figure) {
  const style = getComputedStyle(document.documentElement);
  const text = style.getPropertyValue("--text").trim();
  const line = style.getPropertyValue("--line").trim();
  const soft = style.getPropertyValue("--soft").trim();
  const marks = figure.marks || [];
  const levels = figure.levels || [];
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
  return {
    font: { color: text, family: "system-ui, sans-serif", size: 12 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 44, r: 12, t: 26, b: 36 },
    hovermode: figure.bars ? "closest" : "x unified",
    hoverlabel: { bgcolor: style.getPropertyValue("--panel").trim(), font: { color: text } },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: line, activecolor: text },
    showlegend: false,
    shapes: marks.map((mark) => ({
      type: "line", x0: mark.x, x1: mark.x, yref: "paper", y0: 0, y1: 1,
      line: { color: mark.color, width: 1.2, dash: "dash" },
    })).concat(levels.map((level) => ({
      type: "line", xref: "paper", x0: 0, x1: 1, y0: level.y, y1: level.y,
      line: { color: soft, width: 1.2, dash: "dot" },
    }))),
    annotations: marks.map((mark) => ({
      x: mark.x, yref: "paper", y: 1, yanchor: "top", xanchor: "right", textangle: -90, showarrow: false,
      text: mark.text, font: { size: 10, color: mark.color },
    })).concat(levels.map((level) => ({
      xref: "paper", x: 0, xanchor: "left", y: level.y, yanchor: "bottom", showarrow: false,
      text: level.text, font: { size: 10, color: soft },
    }))),
    barmode: "stack",
    xaxis: { ...axis, ...(figure.from_zero ? { rangemode: "tozero" } : {}), title: { text: figure.bars ? figure.unit : "step", standoff: 6 } },
    yaxis: { ...axis, ...(figure.bars ? { autorange: "reversed" } : {}), ...figure.axis },
  };
}

const buttons = [["toImage", "zoom2d", "pan2d", "resetScale2d"]];
const config = { responsive: true, displaylogo: false, modeBarButtons: buttons };
function tracesOf(figure) {
  const outside = (figure.outside || []).map((marks) => ({ ...marks, visible: figure.traces[marks.of].visible }));
  return figure.traces.concat(outside);
}
function draw() {
  return Promise.all(figures.map((figure, i) => Plotly.react("plot" + i, tracesOf(figure), layoutOf(figure), config)));
}

draw().then(() => { document.documentElement.dataset.drawn = figures.length; });
dark.addEventListener("change", draw);
for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    const off = button.classList.toggle("off");
    const plot = button.closest("figure").querySelector(".plot");
    figures[Number(plot.id.slice(4))].traces[Number(button.dataset.trace)].visible = !off;
    draw();
  });
}
for (const box of document.querySelectorAll("input.all")) {
  box.addEventListener("change", () => {
    box.closest("section").querySelector("table").classList.toggle("everything", box.checked);
  });
}
