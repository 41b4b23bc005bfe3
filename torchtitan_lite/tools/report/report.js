"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");

function layoutOf(figure) {
  const style = getComputedStyle(document.documentElement);
  const text = style.getPropertyValue("--text").trim();
  const line = style.getPropertyValue("--line").trim();
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
  return {
    title: { text: figure.title, x: 0.02, xanchor: "left", font: { size: 15 } },
    font: { color: text, family: "system-ui, sans-serif", size: 12 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 56, r: 16, t: 44, b: 40 },
    hovermode: figure.bars ? "closest" : "x unified",
    hoverlabel: { bgcolor: style.getPropertyValue("--panel").trim(), font: { color: text } },
    legend: { orientation: "h", x: 0, y: -0.22, yanchor: "top", traceorder: "normal" },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: line, activecolor: text },
    showlegend: figure.traces.length > 1,
    barmode: "stack",
    xaxis: { ...axis, title: { text: figure.bars ? figure.unit : "step", standoff: 6 } },
    yaxis: { ...axis, ...(figure.bars ? { autorange: "reversed" } : { title: { text: figure.unit } }), ...figure.axis },
  };
}

const buttons = [["toImage", "zoom2d", "pan2d", "resetScale2d"]];
const config = { responsive: true, displaylogo: false, modeBarButtons: buttons };
function draw() {
  return Promise.all(figures.map((figure, i) => Plotly.react("plot" + i, figure.traces, layoutOf(figure), config)));
}

draw().then(() => { document.documentElement.dataset.drawn = figures.length; });
dark.addEventListener("change", draw);
for (const box of document.querySelectorAll("input.all")) {
  box.addEventListener("change", () => {
    box.closest("section").querySelector("table").classList.toggle("everything", box.checked);
  });
}
