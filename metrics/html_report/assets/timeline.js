"use strict";
// A zoomable timeline on a canvas: a lane per stage, batches by kind, bubbles hatched by cause with a letter.
const timeline = (() => {
  const canvas = document.getElementById("timeline-canvas");
  if (!canvas) return { show: () => {} };
  const kinds = {
    prefill: { fill: "#3B5B92", ink: "#ffffff", hatch: "/" }, decode: { fill: "#F2B84B", ink: "#1c1c1c", hatch: "" },
    mixed: { fill: "#7A9A3C", ink: "#1c1c1c", hatch: "." },
  };
  const causes = {
    pb1: ["#0072B2", "/", "1"], pb2: ["#D55E00", "\\", "2"], pb3: ["#E69F00", "x", "3"], stage_split: ["#CC79A7", "-", "U"],
    fill_drain: ["#999999", ".", "F"], transfer: ["#009E73", "|", "T"], host: ["#56B4E9", "+", "H"], starvation: ["#444444", "o", "S"], rank: ["#CC9900", "\\", "R"],
  };
  const laneHeight = 44, top = 26, gutter = 74;
  const context = canvas.getContext("2d");
  const patterns = new Map();
  let run = null, lanes = [], view = [0, 1], chosen = null, marked = new Set(), markedRequest = null;

  function pattern(colour, hatch, paper) {
    const key = colour + hatch + paper;
    if (patterns.has(key)) return patterns.get(key);
    const tile = document.createElement("canvas");
    tile.width = tile.height = 8;
    const ink = tile.getContext("2d");
    ink.fillStyle = paper;
    ink.fillRect(0, 0, 8, 8);
    ink.strokeStyle = ink.fillStyle = colour;
    ink.lineWidth = 1.4;
    ink.beginPath();
    if ("/x".includes(hatch)) { ink.moveTo(-2, 10); ink.lineTo(10, -2); ink.moveTo(-2, 2); ink.lineTo(2, -2); ink.moveTo(6, 10); ink.lineTo(10, 6); }
    if ("\\x".includes(hatch)) { ink.moveTo(-2, -2); ink.lineTo(10, 10); ink.moveTo(6, -2); ink.lineTo(10, 2); ink.moveTo(-2, 6); ink.lineTo(2, 10); }
    if ("-+".includes(hatch)) { ink.moveTo(0, 4); ink.lineTo(8, 4); }
    if ("|+".includes(hatch)) { ink.moveTo(4, 0); ink.lineTo(4, 8); }
    ink.stroke();
    if (hatch === ".") { ink.fillRect(1, 1, 2, 2); ink.fillRect(5, 5, 2, 2); }
    if (hatch === "o") { ink.beginPath(); ink.arc(4, 4, 2.2, 0, 7); ink.stroke(); }
    const made = context.createPattern(tile, "repeat");
    patterns.set(key, made);
    return made;
  }

  const batchStyle = (kind) => (kind.hatch ? pattern(kind.hatch === "/" ? "#6f8cbd" : "#cfe0a5", kind.hatch, kind.fill) : kind.fill);
  const bubbleStyle = (cause) => pattern(causes[cause][0], causes[cause][1], "#ffffff");

  function unpack(lane) {
    const out = { replica: lane.replica, rank: lane.rank, stage: lane.stage, first: lane.first, start: [], end: [], bubbleStart: [], bubbleEnd: [], cause: lane.bubble_cause };
    let at = 0;
    lane.at.forEach((step, i) => { at += step; out.start.push(at / 1e6); out.end.push((at + lane.lasts[i]) / 1e6); });
    at = 0;
    lane.bubble_at.forEach((step, i) => { at += step; out.bubbleStart.push(at / 1e6); out.bubbleEnd.push((at + lane.bubble_lasts[i]) / 1e6); });
    return out;
  }

  const engineOf = (where) => where.replica + "/" + where.rank;
  const rankOf = (lane) => (run.ranks > 1 ? ", rank " + lane.rank : "");
  function kindOf(batch) { return batch[1] && batch[2] ? "mixed" : batch[1] ? "prefill" : "decode"; }
  const span = () => run.end_s - run.start_s;
  const toX = (t, width) => gutter + ((t - view[0]) / (view[1] - view[0])) * (width - gutter);
  const laneTop = (index) => top + index * laneHeight;

  function firstAfter(sorted, value) {
    let low = 0, high = sorted.length;
    while (low < high) { const middle = (low + high) >> 1; if (sorted[middle] < value) low = middle + 1; else high = middle; }
    return low;
  }

  function draw() {
    const width = canvas.clientWidth || 600, height = top + Math.max(1, lanes.length) * laneHeight + 8;
    const ratio = window.devicePixelRatio || 1;
    canvas.style.height = height + "px";
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      patterns.clear();
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = "#ffffff";
    context.fillRect(0, 0, width, height);
    drawAxis(width, height);
    lanes.forEach((lane, index) => drawLane(lane, index, width));
  }

  function drawAxis(width, height) {
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const rough = (view[1] - view[0]) / Math.max(2, Math.floor((width - gutter) / 90));
    const power = Math.pow(10, Math.floor(Math.log10(rough)));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
    const digits = Math.max(0, -Math.floor(Math.log10(step)));
    for (let t = Math.ceil((view[0] + run.start_s) / step) * step; t <= view[1] + run.start_s + 1e-12; t += step) {
      const x = toX(t - run.start_s, width);
      context.strokeStyle = "#e2e2e2";
      context.beginPath(); context.moveTo(x, top - 4); context.lineTo(x, height); context.stroke();
      context.fillStyle = "#595959";
      context.textAlign = x > width - 40 ? "right" : "center";
      context.fillText(t.toFixed(digits) + " s", x, 11);
    }
    context.textAlign = "left";
    lanes.forEach((lane, index) => {
      context.fillStyle = "#1c1c1c";
      context.fillText("replica " + lane.replica, 2, laneTop(index) + 12);
      context.fillText(run.ranks > 1 ? "rank " + lane.rank + " / " + lane.stage : "stage " + lane.stage, 2, laneTop(index) + 26);
    });
  }

  function drawLane(lane, index, width) {
    const y = laneTop(index), tall = laneHeight - 10;
    context.save();
    context.beginPath(); context.rect(gutter, y - 2, width - gutter, laneHeight); context.clip();
    let painted = -1;
    for (let i = firstAfter(lane.bubbleEnd, view[0]); i < lane.bubbleStart.length && lane.bubbleStart[i] < view[1]; i++) {
      const x = toX(lane.bubbleStart[i], width), wide = toX(lane.bubbleEnd[i], width) - x;
      if (x + wide < painted + 0.4) continue;
      painted = x + Math.max(wide, 0.5);
      const cause = run.causes[lane.cause[i]].key;
      context.fillStyle = bubbleStyle(cause);
      context.fillRect(x, y + 8, Math.max(wide, 0.5), tall - 16);
      if (wide > 18) { context.fillStyle = "#ffffff"; context.fillRect(x + wide / 2 - 6, y + tall / 2 - 7, 12, 14); context.fillStyle = "#1c1c1c";
        context.textAlign = "center"; context.fillText(causes[cause][2], x + wide / 2, y + tall / 2); }
    }
    painted = -1;
    for (let i = firstAfter(lane.end, view[0]); i < lane.start.length && lane.start[i] < view[1]; i++) {
      const x = toX(lane.start[i], width), wide = toX(lane.end[i], width) - x;
      if (x + wide < painted + 0.4) continue;
      painted = x + Math.max(wide, 0.6);
      const batch = run.batches[lane.first + i], kind = kinds[kindOf(batch)];
      context.fillStyle = batchStyle(kind);
      context.fillRect(x, y, Math.max(wide, 0.6), tall);
      if (wide > 3) { context.strokeStyle = "#ffffff"; context.lineWidth = 1; context.strokeRect(x, y, wide, tall); }
      if (wide > 64) label(batch, kind, x, y, wide, tall);
      if (marked.has(engineOf(lane) + ":" + batch[0])) { context.fillStyle = "#1c1c1c"; context.fillRect(x, y + tall, Math.max(wide, 1.5), 5); }
      if (chosen && chosen.index === lane.first + i) { context.strokeStyle = "#1c1c1c"; context.lineWidth = 3; context.strokeRect(x + 1, y + 1, Math.max(wide - 2, 2), tall - 2); }
    }
    context.restore();
    context.textAlign = "left";
  }

  function label(batch, kind, x, y, wide, tall) {
    const parts = [];
    if (batch[1]) parts.push("P " + batch[1]);
    if (batch[2]) parts.push("D " + batch[2]);
    const text = parts.join("  "), size = context.measureText(text).width;
    if (size > wide - 8) return;
    if (kind.hatch) { context.fillStyle = kind.fill; context.fillRect(x + wide / 2 - size / 2 - 3, y + tall / 2 - 8, size + 6, 16); }
    context.fillStyle = kind.ink;
    context.textAlign = "center";
    context.fillText(text, x + wide / 2, y + tall / 2);
  }

  function tell() {
    const told = document.getElementById("timeline-told");
    if (!chosen) { told.textContent = "Nothing chosen."; return; }
    const batch = run.batches[chosen.index], lane = lanes[chosen.lane], i = chosen.index - lane.first;
    const [number, prefill, decodes, dummy, ctx] = batch;
    const at = run.start_s + lane.start[i], took = 1e3 * (lane.end[i] - lane.start[i]);
    let text = `Iteration ${number} on replica ${lane.replica}${rankOf(lane)}, stage ${lane.stage}: ${at.toFixed(4)} to ${(at + took / 1e3).toFixed(4)} s (${shown(took)} ms), ${kindOf(batch)}: ${prefill} prefill tokens, ${decodes} decodes`;
    if (dummy) text += `, ${dummy} dummy rows`;
    if (decodes) text += `, contexts of ${Math.round(ctx / decodes)} tokens on average`;
    const before = lane.bubbleEnd.findIndex((end) => Math.abs(end - lane.start[i]) < 2e-6);
    if (before >= 0) text += `. Before it a bubble of ${shown(1e3 * (lane.bubbleEnd[before] - lane.bubbleStart[before]))} ms: ${run.causes[lane.cause[before]].name}`;
    if (markedRequest !== null) text += marked.has(engineOf(lane) + ":" + number) ? `. Request ${markedRequest} rode in it` : `. Request ${markedRequest} was not in it`;
    told.textContent = text + ".";
  }

  function setView(start, end) {
    const least = Math.max(span() / 1e6, 1e-5), wide = Math.min(Math.max(end - start, least), span());
    const low = Math.min(Math.max(start, 0), span() - wide);
    view = [low, low + wide];
    draw();
  }
  const zoom = (factor, at) => { const middle = at === undefined ? (view[0] + view[1]) / 2 : at; setView(middle - (middle - view[0]) * factor, middle + (view[1] - middle) * factor); };
  const move = (share) => { const by = share * (view[1] - view[0]); setView(view[0] + by, view[1] + by); };

  function choose(laneIndex, i, follow) {
    const lane = lanes[laneIndex];
    if (!lane || i < 0 || i >= lane.start.length) return;
    chosen = { lane: laneIndex, index: lane.first + i };
    const middle = (lane.start[i] + lane.end[i]) / 2, wide = view[1] - view[0];
    if (follow && (lane.start[i] < view[0] || lane.end[i] > view[1])) setView(middle - wide / 2, middle + wide / 2);
    draw();
    tell();
  }
  function step(by) {
    const laneIndex = chosen ? chosen.lane : 0, lane = lanes[laneIndex];
    if (!lane) return;
    choose(laneIndex, chosen ? chosen.index - lane.first + by : Math.max(0, firstAfter(lane.start, view[0])), true);
  }
  function widest() {
    let best = [0, 0, -1];
    lanes.forEach((lane, l) => lane.start.forEach((start, i) => { if (lane.end[i] - start > best[2]) best = [l, i, lane.end[i] - start]; }));
    if (best[2] < 0) return;
    setView(lanes[best[0]].start[best[1]] - 6 * best[2], lanes[best[0]].end[best[1]] + 6 * best[2]);
    choose(best[0], best[1], true);
  }

  function open(label) {
    run = report.runs.find((each) => each.label === label).timeline;
    lanes = run.lanes.map(unpack);
    chosen = null;
    marked = new Set();
    markedRequest = null;
    const part = run.whole ? "The whole run." : `A part of the run, ${run.start_s.toFixed(2)} to ${run.end_s.toFixed(2)} s of ${run.run_s[0].toFixed(2)} to ${run.run_s[1].toFixed(2)} s, around its longest stall unless another was asked for.`;
    const share = !Number.isFinite(run.bubble_share) ? "" : ` Bubbles take ${(100 * run.bubble_share).toFixed(1)} % of the time with work in flight, over the whole run.`;
    document.getElementById("timeline-window").textContent = part + share;
    canvas.setAttribute("aria-label", `Timeline of ${label}: ${lanes.length} lanes, ${run.batches.length} batches. ${part}`);
    legend();
    bubbleTable();
    tell();
    setView(0, span());
  }

  function legend() {
    const list = document.getElementById("timeline-legend");
    list.replaceChildren();
    const swatch = (style, text, letter) => {
      const box = element("canvas", { width: "34", height: "18", "aria-hidden": "true" }), ink = box.getContext("2d");
      ink.fillStyle = style;
      ink.fillRect(0, 0, 34, 18);
      list.append(element("li", {}, box, letter ? `${letter}: ${text}` : text));
    };
    for (const [name, kind] of Object.entries(kinds)) swatch(batchStyle(kind), name + (name === "mixed" ? " (prefill and decodes)" : ""));
    const present = new Set(lanes.flatMap((lane) => lane.cause));
    run.causes.forEach((cause, index) => { if (present.has(index)) swatch(bubbleStyle(cause.key), "bubble, " + cause.name, causes[cause.key][2]); });
  }

  function bubbleTable() {
    const table = document.getElementById("bubble-table"), shares = run.cause_shares || {};
    const rows = run.causes.map((cause) => element("tr", {}, element("th", { scope: "row" }, cause.name), element("td", {}, (100 * (shares[cause.key] || 0)).toFixed(2) + " %")));
    table.replaceChildren(element("caption", {}, "Share of in-flight time of all stages, over the whole run"), element("tbody", {}, ...rows));
  }

  const keys = {
    ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2),
    Home: () => setView(0, span()), n: () => step(1), p: () => step(-1), w: widest,
  };
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    const share = (event.offsetX - gutter) / (canvas.clientWidth - gutter);
    zoom(event.deltaY > 0 ? 1.25 : 0.8, view[0] + share * (view[1] - view[0]));
  }, { passive: false });
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => { drag = { x: event.clientX, view: [...view], moved: false }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const by = event.clientX - drag.x;
    if (Math.abs(by) > 3) drag.moved = true;
    const shift = (-by / (canvas.clientWidth - gutter)) * (drag.view[1] - drag.view[0]);
    if (drag.moved) setView(drag.view[0] + shift, drag.view[1] + shift);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag && !drag.moved) {
      const t = view[0] + ((event.offsetX - gutter) / (canvas.clientWidth - gutter)) * (view[1] - view[0]);
      const laneIndex = Math.floor((event.offsetY - top) / laneHeight), lane = lanes[laneIndex];
      if (lane) { const i = firstAfter(lane.end, t); if (lane.start[i] <= t) choose(laneIndex, i, false); }
    }
    drag = null;
  });
  const on = (id, action) => document.getElementById(id).addEventListener("click", action);
  on("zoom-in", () => zoom(0.5)); on("zoom-out", () => zoom(2)); on("move-left", () => move(-0.5)); on("move-right", () => move(0.5));
  on("show-all", () => setView(0, span())); on("next-batch", () => step(1)); on("widest", widest);
  const runs = document.getElementById("timeline-run");
  for (const each of report.runs) runs.append(element("option", { value: each.label }, each.label));
  runs.addEventListener("change", () => open(runs.value));
  new ResizeObserver(() => { if (run) draw(); }).observe(canvas.parentElement);
  if (report.runs.length) open(report.runs[0].label);

  // A request from the inspector: mark the batches it rode in, and look at where it lived.
  function show(label, request) {
    if (runs.value !== label) { runs.value = label; open(label); }
    const first = request.chunks.length ? request.chunks[0][1] / 1e6 : request.first_us / 1e6;
    const last = request.finished_s;
    marked = new Set(request.chunks.map((chunk) => engineOf(request) + ":" + chunk[0]));
    markedRequest = request.request;
    const times = [];
    if (request.first_us !== null) { let at = request.first_us; times.push(at); for (const gap of request.gaps_us) { at += gap; times.push(at); } }
    lanes.forEach((lane) => {
      if (engineOf(lane) !== engineOf(request)) return;
      const lastStage = lanes.filter((other) => engineOf(other) === engineOf(lane)).length - 1;
      if (lane.stage !== lastStage) return;
      for (const time of times) {
        // A token comes with the batch that ended last before it was delivered.
        const i = firstAfter(lane.end, time / 1e6 - run.start_s + 2e-6) - 1;
        if (i >= 0) marked.add(engineOf(lane) + ":" + run.batches[lane.first + i][0]);
      }
    });
    setView(first - run.start_s - 0.05 * (last - first), last - run.start_s + 0.05 * (last - first));
    tell();
    canvas.focus();
    canvas.scrollIntoView({ block: "center" });
  }
  return { show };
})();
