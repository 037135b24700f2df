"use strict";
// Plots and tables of the report: Plotly for pictures, and under each of them its numbers.
const report = JSON.parse(document.getElementById("report-data").textContent);

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  for (const child of children) made.append(child);
  return made;
}

function shown(value) {
  if (value === null || value === undefined) return "-";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
}

const plotLayout = {
  margin: { l: 60, r: 12, t: 34, b: 44 }, font: { family: "system-ui, sans-serif", size: 12, color: "#1c1c1c" },
  legend: { orientation: "h", y: -0.2 }, paper_bgcolor: "#ffffff", plot_bgcolor: "#ffffff", hovermode: "closest",
};
const plotConfig = { responsive: true, displaylogo: false, displayModeBar: window.innerWidth < 600 ? false : "hover", modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };

function axis(settings) {
  settings = Object.assign({}, settings);
  if (settings.title) settings.title = { text: settings.title.text, standoff: 6 };
  const base = { gridcolor: "#e2e2e2", zerolinecolor: "#999999", automargin: true, exponentformat: "SI" };
  return Object.assign(base, settings);
}

function drawPlot(place, traces, layout) {
  const full = Object.assign({}, plotLayout, layout, { xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis) });
  // On a phone a legend takes a line a run: the plot grows, so that its own part stays as tall.
  if (window.innerWidth < 600 && traces.length > 3) {
    place.style.height = 260 + 20 * traces.length + "px";
    full.legend = Object.assign({}, full.legend, { y: -0.3, entrywidth: 1, entrywidthmode: "fraction" });
  }
  return Plotly.react(place, traces, full, plotConfig);
}

function dataTable(headings, rows, label) {
  const head = element("tr", {}, ...headings.map((text) => element("th", { scope: "col" }, text)));
  const body = rows.map((row) => element("tr", {}, ...row.map((cell) => element("td", typeof cell === "number" ? {} : { class: "text" }, shown(cell)))));
  const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, table);
}

function tableOfTraces(plot) {
  const rows = [];
  for (const trace of plot.traces) trace.x.forEach((x, index) => rows.push([trace.name, x, trace.y[index]]));
  const title = (side) => (plot.layout[side].title || { text: side }).text;
  return dataTable(["run", title("xaxis"), title("yaxis")], rows, plot.title);
}

function drawPlots() {
  const area = document.getElementById("plot-area");
  if (!area) return;
  area.className = "plots";
  const places = [];
  for (const plot of report.plots) {
    const place = element("div", { class: "plot", role: "img", "aria-label": plot.title });
    const details = element("details", {}, element("summary", {}, "Numbers: " + plot.title));
    // The table is made when somebody opens it: pages with many runs would be slow otherwise.
    details.addEventListener("toggle", () => { if (details.open && details.children.length < 2) details.append(tableOfTraces(plot)); });
    area.append(element("figure", {}, element("figcaption", {}, plot.title, element("small", {}, plot.says)), place, details));
    const stacked = plot.traces.length && plot.traces.every((trace) => trace.stackgroup);
    if (stacked && !plot.traces.some((trace) => trace.y.some((value) => value > 0))) {
      place.className = "told"; place.textContent = "No batch ran."; details.remove();
    } else if (plot.traces.some((trace) => trace.x.length)) places.push([place, plot]);
    else { place.className = "told"; place.textContent = "Nothing was measured: no request finished."; details.remove(); }
  }
  // Drawn when all cells are there: the only cell of a grid is as wide as the page.
  for (const [place, plot] of places) drawPlot(place, plot.traces, plot.layout);
}

function drawPicture() {
  const area = document.getElementById("picture");
  if (!area || !report.picture.traces.some((trace) => trace.x.length)) return;
  const plot = report.picture, place = element("div", { class: "plot", role: "img", "aria-label": plot.title });
  area.append(element("figure", {}, element("figcaption", {}, plot.title, element("small", {}, plot.says)), place));
  drawPlot(place, plot.traces, plot.layout);
}

// A table that goes on beyond its frame says so.
function sayMore() {
  for (const frame of document.querySelectorAll(".scroll")) {
    const more = frame.scrollWidth > frame.clientWidth + 1;
    let hint = frame.previousElementSibling;
    if (!hint || !hint.classList.contains("scroll-hint")) {
      if (!more) continue;
      hint = element("p", { class: "scroll-hint" }, "This table goes on to the right: scroll it sideways.");
      frame.before(hint);
    }
    hint.hidden = !more;
  }
}

// Tables of rows (sweeps, capacities): any column against any other.
const symbols = ["circle", "square", "triangle-up", "diamond", "x", "cross", "star", "hexagon", "triangle-down", "pentagon"];
const colours = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255", "#999933", "#332288"];
const firstChoices = ["goodput_requests_per_s", "tbt_ms_p99", "ttft_ms_p99", "output_tokens_per_s", "requests_per_s"];

function numeric(table) {
  const names = [...new Set(table.rows.flatMap((row) => Object.keys(row)))];
  return names.filter((name) => table.rows.some((row) => typeof row[name] === "number"));
}

function select(label, options, chosen, changed) {
  const made = element("select", {});
  for (const option of options) made.append(element("option", { value: option }, option || "nothing"));
  made.value = chosen;
  made.addEventListener("change", changed);
  return [element("label", {}, label, made), made];
}

// Columns come with their names written once; rows are made of them here.
function rowsOf(table) {
  const columns = Object.entries(table.columns);
  return Array.from({ length: table.length }, (_, at) => Object.fromEntries(columns.map(([name, values]) => [name, values[at]])));
}

function exploreTable(table, number) {
  table.rows = rowsOf(table);
  const area = document.getElementById("table-plot-" + number);
  const numbers = numeric(table);
  if (!numbers.length) return;
  const varying = table.axes.filter((name) => new Set(table.rows.map((row) => String(row[name]))).size > 1);
  // Across: the axis of numbers that most points have, since a point without a value cannot be drawn.
  const without = (name) => table.rows.filter((row) => row[name] === null || row[name] === undefined).length;
  const x = varying.filter((name) => numbers.includes(name)).sort((a, b) => without(a) - without(b))[0] || varying[0] || table.axes[0] || numbers[0];
  const y = [table.up, ...firstChoices].find((name) => name !== x && numbers.includes(name)) || numbers.find((name) => name !== x && !table.axes.includes(name)) || x;
  const by = varying.find((name) => name !== x) || "";
  const place = element("div", { class: "plot", role: "img", "aria-label": table.title });
  const left = element("p", { class: "left-out", role: "status" });
  const draw = () => {
    const groups = new Map();
    for (const row of table.rows) {
      const key = bySelect.value ? String(row[bySelect.value]) : "all";
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(row);
    }
    const traces = [...groups].map(([key, rows], index) => {
      const known = rows.filter((row) => typeof row[ySelect.value] === "number" && row[xSelect.value] !== null && row[xSelect.value] !== undefined);
      known.sort((a, b) => (a[xSelect.value] > b[xSelect.value] ? 1 : -1));
      const colour = colours[index % colours.length];
      const low = known.map((row) => row[ySelect.value + "_low"]), high = known.map((row) => row[ySelect.value + "_high"]);
      const bars = known.length && low.every((v) => typeof v === "number") && high.every((v) => typeof v === "number");
      const xs = known.map((row) => row[xSelect.value]);
      // A line through several points above one another would say nothing.
      const mode = new Set(xs).size < xs.length ? "markers" : "lines+markers";
      const trace = { name: key, x: xs, y: known.map((row) => row[ySelect.value]), mode,
        line: { color: colour, width: 1 }, marker: { color: colour, symbol: symbols[index % symbols.length], size: 9 } };
      if (bars) trace.error_y = { type: "data", symmetric: false, array: high.map((v, i) => v - trace.y[i]), arrayminus: low.map((v, i) => trace.y[i] - v) };
      return trace;
    });
    const missing = table.rows.length - traces.reduce((sum, trace) => sum + trace.x.length, 0);
    left.textContent = missing ? `${missing} of ${table.rows.length} rows are not drawn: they have no ${xSelect.value} or no ${ySelect.value}.` : "";
    drawPlot(place, traces, { xaxis: { title: { text: xSelect.value } }, yaxis: { title: { text: ySelect.value }, rangemode: "tozero" },
      showlegend: Boolean(bySelect.value), legend: Object.assign({}, plotLayout.legend, { title: { text: bySelect.value.replaceAll("_", " ") + " " } }) });
  };
  const [xLabel, xSelect] = select("Across", [...new Set([...table.axes, ...numbers])], x, draw);
  const [yLabel, ySelect] = select("Up", numbers, y, draw);
  const [byLabel, bySelect] = select("A line for each", ["", ...table.axes], by, draw);
  area.append(element("div", { class: "controls" }, xLabel, yLabel, byLabel), element("figure", {}, place), left);
  draw();
}

drawPicture();
drawPlots();
report.tables.forEach(exploreTable);
sayMore();
window.addEventListener("resize", sayMore);
