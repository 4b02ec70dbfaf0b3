/* Charts of the last hours, of the fleet or of one worker, from GET /history. They share one pointer. */
/* The text of a chart without values. */
const lacks = (what) => () => last.usage_metrics ? `no answer reports ${what}` : `${what} are not counted; [server] usage_metrics is off`;
const CHARTS = [
  { name: "Requests per second", unit: count, least: 4, lines: [["requests_per_sec", "all", "blue", true], ["errors_per_sec", "errors", "bad", true]] },
  { name: "Time to first token", unit: millis, least: 10, compared: true, lines: [["first_p95_ms", "p95", "soft"], ["first_p50_ms", "p50", "blue"]] },
  { name: "Time between tokens", unit: millis, least: 10, compared: true, lines: [["between_p95_ms", "p95", "soft"], ["between_p50_ms", "p50", "blue"]] },
  { name: "In flight and queue", unit: count, least: 4, lines: [["in_flight", "in flight", "blue", true], ["waiting", "queue", "warn"]] },
  { name: "Tokens per second", unit: count, least: 10, none: lacks("tokens"), lines: [["input_tokens_per_sec", "in", "soft"], ["output_tokens_per_sec", "out", "blue"]] },
  { name: "Cache hit rate", unit: share, least: 1, none: lacks("cached tokens"), compared: true, lines: [["cache_hit_ratio", "of prompt tokens", "blue", true]] },
];
const THIS_PROXY = "this";  // no worker has this id
const RANGES = [[900, "15 min"], [3600, "1 h"], [21600, "6 h"]];
const LEFT = 46, RIGHT = 4, TOP = 6, BOTTOM = 92, TALL = 112;
let range = 900, scope = "", past = null, fleetPast = null, pastAt = -Infinity, pastTurn = 0, cross = null;

const rangeButtons = RANGES.map(([secs, words]) => {
  const it = pressed(words, "", () => choose(secs, scope));
  mark(it, "aria-pressed", secs === range);
  it.dataset.secs = secs;
  return it;
});
$("ranges").append(...rangeButtons);
$("scope").addEventListener("change", () => choose(range, $("scope").value));
for (const chart of CHARTS) buildChart(chart);
/* Charts are drawn for a fixed width. */
new ResizeObserver(() => { if (past && last) drawCharts(); }).observe($("charts"));

/* Responses for another range or worker are dropped. */
function choose(secs, worker) {
  range = secs;
  scope = worker;
  past = fleetPast = null;
  pastAt = -Infinity;
  pastTurn += 1;
  for (const it of rangeButtons) mark(it, "aria-pressed", Number(it.dataset.secs) === range);
  if ($("scope").value !== scope) $("scope").value = scope;
  if (last) paintCharts();
}
async function refreshPast() {
  const ownTurn = pastTurn;
  pastAt = performance.now();
  const query = `history?secs=${range}`, ofWorker = scope && scope !== THIS_PROXY;
  const wanted = ofWorker ? `${query}&worker=${encodeURIComponent(scope)}` : !scope && inCluster() ? `${query}&of=cluster` : query;
  /* A worker's series count requests through this proxy only, so the fleet's do, too. */
  const [own, all] = await Promise.all([ask("GET", wanted), ofWorker ? ask("GET", query) : null]);
  if (ownTurn !== pastTurn || !last) return;
  if (own.status === 404) { choose(range, ""); return; }
  if (!own.ok) return;
  past = whole(own.body);
  fleetPast = all?.ok ? whole(all.body) : null;
  drawCharts();
}
/* The current one of the shortest steps is incomplete: reports of some workers are missing. */
function whole(body) {
  if (body.step_secs < 10) for (const series of Object.values(body.series)) series[series.length - 1] = null;
  return body;
}
cleaners.push(() => {
  past = fleetPast = null;
  pastAt = -Infinity;
  pastTurn += 1;
  scope = "";
  $("scope").replaceChildren();
  $("scope").filled = undefined;
  $("chart-values").replaceChildren();
  say($("traffic-says"), "");
  for (const chart of CHARTS) {
    chart.svg.removeAttribute("aria-label");
    chart.fixed.replaceChildren();
    chart.spans.replaceChildren();
    for (const value of chart.values) say(value, "");
    for (const { area, line } of chart.paths) for (const path of [area, line]) path?.removeAttribute("d");
    chart.other.removeAttribute("d");
  }
});

function buildChart(chart) {
  chart.svg = draw("svg", { role: "img", tabindex: "0" });
  chart.fixed = draw("g", {});
  chart.spans = draw("g", {});
  chart.cross = draw("line", { class: "cross", y1: 4, y2: BOTTOM, visibility: "hidden" });
  chart.other = draw("path", { class: "line other" });
  chart.svg.append(chart.spans, chart.fixed, chart.other);
  chart.paths = chart.lines.map(([, , kind, filled]) => {
    const area = filled ? draw("path", { class: `area ${kind}` }) : null;
    const line = draw("path", { class: `line ${kind}` });
    if (area) chart.svg.append(area);
    chart.svg.append(line);
    return { area, line };
  });
  chart.svg.append(chart.cross);
  chart.at = make("span", "quiet");
  chart.values = [];
  const key = make("div", "key", ...chart.lines.map(([, word, kind]) => {
    chart.values.push(make("b"));
    return make("span", "", make("i", `swatch ${kind}`), word + " ", chart.values.at(-1));
  }), chart.at);
  $("charts").append(make("div", "chart", make("h3", "", chart.name), key, chart.svg));
  chart.svg.addEventListener("pointermove", (event) => {
    const box = chart.svg.getBoundingClientRect();
    aim((event.clientX - box.x - LEFT) / (box.width - LEFT - RIGHT));
  });
  chart.svg.addEventListener("pointerleave", () => aim(null));
  chart.svg.addEventListener("blur", () => aim(null));
  chart.svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    aim(Math.min(1, Math.max(0, (cross ?? 1) + step * (event.shiftKey ? 10 : 1) / 179)));
  });
}
function aim(at) {
  cross = at === null || at < 0 || at > 1 ? null : at;
  if (past) drawCharts();
}
/* The next round number, so that an axis rarely changes. */
function ceiling(value, least) {
  if (value <= least) return least;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value);
}
/* Runs each second: fetches what is due; the response is drawn when it arrives. */
function paintCharts() {
  if (scope === THIS_PROXY && !inCluster()) choose(range, "");
  fill($("scope"), [last.fleet.map((worker) => worker.id), inCluster()], () => [
    ...inCluster() ? [new Option("the fleet, through all proxies", ""), new Option("the fleet, through this proxy", THIS_PROXY)] : [new Option("the fleet", "")], ...last.fleet.map((worker) => new Option(worker.display_id ?? short(worker.url), worker.id)),
  ]);
  if ($("scope").value !== scope) $("scope").value = scope;
  const due = past ? Math.min(past.step_secs, 30) * 1000 : 1500;
  if (performance.now() - pastAt > due) refreshPast();
  say($("traffic-says"), last.metrics === false ? OFF : trafficWords());
}
/* Figures of the same time range and worker as the charts. */
function trafficWords() {
  const words = (all, failed, span) => `${one(all, "request")}, ${one(failed, "error")} in ${span}`;
  if ((scope === THIS_PROXY || !scope && !inCluster()) && range === WINDOW_SECS) return words(recentSum("requests", range), recentSum("errors", range), "15 min");
  if (!past) return "";
  const sum = (name) => Math.round(past.series[name].filter(known).reduce((total, value) => total + value * past.step_secs, 0));
  return words(sum("requests_per_sec"), sum("errors_per_sec"), RANGES.find(([secs]) => secs === range)[1]);
}
function drawCharts() {
  say($("traffic-says"), last.metrics === false ? OFF : trafficWords());
  const step = past.step_secs, end = past.from + past.secs;
  const begin = Math.max(past.from, Math.min(end - LEAST_SECS, firstKnown()));
  const length = past.series.in_flight.length;
  const chosen = cross === null ? null : Math.min(length - 1, Math.floor((begin - past.from + cross * (end - begin)) / step));
  for (const chart of CHARTS) drawChart(chart, begin, end, step, chosen);
  fill($("chart-values"), past.from + past.secs + scope, () => [make("table", "", make("thead", "", make("tr", "", ...["Series", "now", "mean", "highest"].map((name) => make("th", "", name)))),
    make("tbody", "", ...CHARTS.flatMap((chart) => chart.lines.map(([name, word]) => {
      const values = past.series[name].filter(known);
      const mean = values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
      return make("tr", "", make("td", "", `${chart.name}, ${word}`), ...[newest(name), mean, values.length ? Math.max(...values) : null].map((value) => make("td", "", chart.unit(value))));
    }))))]);
}
/* The current step may have no value yet. */
const newest = (name) => past.series[name].at(-1) ?? past.series[name].at(-2) ?? null;

/* Charts begin no earlier than the proxy: otherwise most of each would be empty after a start. */
const LEAST_SECS = 120;
function firstKnown() {
  const at = Object.values(past.series).map((values) => values.findIndex(known)).filter((each) => each >= 0);
  return past.from + Math.min(...at, past.secs / past.step_secs) * past.step_secs;
}
function drawChart(chart, begin, end, step, chosen) {
  const width = Math.max(120, chart.svg.clientWidth || 400);
  mark(chart.svg, "viewBox", `0 0 ${width} ${TALL}`);
  const x = (at) => LEFT + ((width - LEFT - RIGHT) * (at - begin)) / (end - begin);
  const other = chart.compared && fleetPast ? fleetPast.series[chart.lines.at(-1)[0]] : [];
  const values = [...other, ...chart.lines.flatMap(([name]) => past.series[name])].filter(known);
  const high = ceiling(Math.max(0, ...values), chart.least);
  const y = (value) => BOTTOM - ((BOTTOM - TOP) * value) / high;
  drawAxes(chart, width, x, y, { begin, end, high });
  if (!values.length && chart.none) {
    chart.none().split("; ").forEach((line, at) => {
      const words = draw("text", { class: "axis none", x: (width + LEFT) / 2, y: 40 + 16 * at, "text-anchor": "middle" });
      words.textContent = line;
      chart.fixed.append(words);
    });
  }
  const spots = (series) => series.map((value, at) => [x(past.from + (at + 0.5) * step), known(value) ? y(value) : null]);
  mark(chart.other, "d", trace(spots(other)));
  chart.lines.forEach(([name], index) => {
    const { area, line } = chart.paths[index], series = past.series[name], points = spots(series);
    mark(line, "d", trace(points));
    if (area) mark(area, "d", shaded(points));
    say(chart.values[index], chart.unit(chosen === null ? newest(name) : series[chosen]));
  });
  mark(chart.cross, "visibility", chosen === null ? "hidden" : "visible");
  const at = chosen === null ? null : past.from + (chosen + 0.5) * step;
  if (at !== null) for (const name of ["x1", "x2"]) mark(chart.cross, name, x(at).toFixed(1));
  say(chart.at, at === null ? "" : clock(at, step < 60));
  mark(chart.at, "title", at === null ? "" : utc(at));
  const words = RANGES.find(([secs]) => secs === range)[1];
  const now = chart.lines.map(([name, word]) => `${word} ${known(newest(name)) ? chart.unit(newest(name)) : "not known"}`).join(", ");
  mark(chart.svg, "aria-label", `${chart.name} of ${scope === THIS_PROXY ? "this proxy" : scope ? short(decodeURIComponent(scope)) : "the fleet"} over the last ${words}; now ${now}; at most ${values.length ? chart.unit(Math.max(...values)) : "not known"}`);
}
const TICKS = [30, 60, 180, 360, 600, 1200, 3600, 7200];
function drawAxes(chart, width, x, y, { begin, end, high }) {
  const step = TICKS.find((secs) => (end - begin) / secs <= (width > 300 ? 6 : 3));
  const half = step < 60 ? 27 : 18, marks = []; // width of the labels in pixels: labels that do not fit are omitted
  for (let at = Math.ceil(begin / step) * step; at <= end - step / 9; at += step) if (x(at) > LEFT + 14 && x(at) + half <= width) marks.push(at);
  chart.fixed.replaceChildren(
    ...[0, 0.5, 1].flatMap((part) => {
      const height = y(high * part), words = draw("text", { class: "axis", x: LEFT - 5, y: height + 4, "text-anchor": "end" });
      words.textContent = part ? chart.unit(high * part) : "0";
      return [draw("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: height, y2: height }), words];
    }),
    ...marks.map((at) => {
      const words = draw("text", { class: "axis", x: x(at), y: BOTTOM + 15, "text-anchor": "middle" });
      words.textContent = clock(at, step < 60);
      return words;
    }));
  chart.spans.replaceChildren(...operations().filter((each) => each.to > begin).map((each) => {
    const from = Math.max(begin, each.from);
    return draw("rect", { class: "span", x: x(from), y: TOP, width: Math.max(2, x(Math.min(end, each.to)) - x(from)), height: BOTTOM - TOP });
  }));
}
/* A path through the points, with a gap for a missing value. */
function trace(spots) {
  let path = "", pen = false;
  for (const [x, y] of spots) {
    if (y === null) { pen = false; continue; }
    path += `${pen ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    if (!pen) path += "h.01";
    pen = true;
  }
  return path;
}
function shaded(spots) {
  let path = "", from = null, before = null;
  const end = () => { if (from !== null) path += `L${before.toFixed(1)} ${BOTTOM}L${from.toFixed(1)} ${BOTTOM}Z`; from = null; };
  for (const [x, y] of spots) {
    if (y === null) { end(); continue; }
    path += from === null ? `M${x.toFixed(1)} ${y.toFixed(1)}` : `L${x.toFixed(1)} ${y.toFixed(1)}`;
    if (from === null) from = x;
    before = x;
  }
  end();
  return path;
}
