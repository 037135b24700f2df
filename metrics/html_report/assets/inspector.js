"use strict";
// The request inspector: one request at a time, its story in sentences and its gaps as bars.
(() => {
  const runs = document.getElementById("request-run");
  if (!runs) return;
  const order = document.getElementById("request-order"), chosen = document.getElementById("request-chosen");
  for (const each of report.runs) runs.append(element("option", { value: each.label }, each.label));
  const data = () => report.runs.find((each) => each.label === runs.value).requests;
  const measures = {
    longest_gap_s: (r) => r.longest_gap_s, ttft: (r) => (r.first_token_s === null ? null : r.first_token_s - r.arrival_s),
    e2e: (r) => r.finished_s - r.arrival_s, request: (r) => -r.request,
  };
  const seconds = (value) => (value === null ? "-" : value >= 1 ? shown(value) + " s" : shown(1e3 * value) + " ms");

  function fill() {
    const measure = measures[order.value], list = [...data().requests];
    list.sort((a, b) => (measure(b) ?? -1e9) - (measure(a) ?? -1e9));
    chosen.replaceChildren(...list.map((r) => element("option", { value: String(r.request) },
      `${r.request}: ${r.status}, first token ${seconds(measures.ttft(r))}, longest gap ${seconds(r.longest_gap_s)}`)));
    document.getElementById("request-how").textContent = `${list.length} of ${data().of.toLocaleString("en")} requests: ${data().how}.`;
    tell();
  }
  const current = () => data().requests.find((r) => String(r.request) === chosen.value);

  function tell() {
    const request = current(), told = document.getElementById("request-told");
    if (!request) { told.replaceChildren(); return; }
    const facts = [["prompt tokens", request.prompt_tokens], ["output tokens", request.output_tokens], ["status", request.status],
      ["first token after", seconds(measures.ttft(request))], ["end to end", seconds(measures.e2e(request))],
      ["longest gap", seconds(request.longest_gap_s)], ["preemptions", request.preemptions], ["from the prefix cache", request.cached_tokens], ["replica", request.replica]];
    const table = element("table", {}, element("caption", {}, `Request ${request.request}`), element("tbody", {},
      ...facts.map(([name, value]) => element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, shown(value))))));
    const story = element("ol", { class: "story" }, ...request.story.map((line) => element("li", {}, line)));
    told.replaceChildren(element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Facts of the request" }, table), element("h3", {}, "What happened"), story);
    const gaps = request.gaps_us.map((gap) => gap / 1000), place = document.getElementById("request-gaps");
    // Fewer than two tokens have no gap between them.
    place.closest("figure").hidden = !gaps.length;
    if (!gaps.length) return;
    drawPlot(place, [{ type: "bar", name: "gap", x: gaps.map((_, i) => i + 2), y: gaps, marker: { color: "#0072B2" } }],
      { xaxis: { title: { text: "token" } }, yaxis: { title: { text: "ms since the one before" }, rangemode: "tozero" }, bargap: 0 });
  }
  const step = (by) => { const next = chosen.selectedIndex + by; if (next >= 0 && next < chosen.options.length) { chosen.selectedIndex = next; tell(); } };
  runs.addEventListener("change", fill);
  order.addEventListener("change", fill);
  chosen.addEventListener("change", tell);
  document.getElementById("request-before").addEventListener("click", () => step(-1));
  document.getElementById("request-next").addEventListener("click", () => step(1));
  document.getElementById("request-show").addEventListener("click", () => { const request = current(); if (request) timeline.show(runs.value, request); });
  fill();
})();
