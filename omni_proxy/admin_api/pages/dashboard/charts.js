/* Charts of the last hours, of the fleet or of one worker, from GET /history. They share one crosshair. */
/* The text of a chart without values. */
const noDataText = (figure) => () => snapshot.usage_metrics ? `no response reports ${figure}` : `${figure} are not counted; [server] usage_metrics is off`;
const CHARTS = [
  { name: "Requests per second", unit: formatNumber, minimum: 4, lines: [["requests_per_sec", "all", "info", true], ["errors_per_sec", "errors", "error", true]] },
  { name: "Time to first token", unit: formatMillis, minimum: 10, comparesFleet: true, lines: [["first_p95_ms", "p95", "secondary"], ["first_p50_ms", "p50", "info"]] },
  { name: "Time between tokens", unit: formatMillis, minimum: 10, comparesFleet: true, lines: [["between_p95_ms", "p95", "secondary"], ["between_p50_ms", "p50", "info"]] },
  { name: "In flight and queue", unit: formatNumber, minimum: 4, lines: [["in_flight", "in flight", "info", true], ["waiting", "queue", "warning"]] },
  { name: "Tokens per second", unit: formatNumber, minimum: 10, noData: noDataText("tokens"), lines: [["input_tokens_per_sec", "in", "secondary"], ["output_tokens_per_sec", "out", "info"]] },
  { name: "Cache hit rate", unit: formatPercent, minimum: 1, noData: noDataText("cached tokens"), comparesFleet: true, lines: [["cache_hit_ratio", "of prompt tokens", "info", true]] },
];
const THIS_PROXY = "this";  // no worker has this id
const RANGES = [[900, "15 min"], [3600, "1 h"], [21600, "6 h"]];
const LEFT = 46, RIGHT = 4, TOP = 6, BOTTOM = 92, HEIGHT = 112;
let range = 900, scope = "", chartData = null, fleetData = null, fetchedAt = -Infinity, fetchNumber = 0, crosshair = null;

const rangeButtons = RANGES.map(([secs, label]) => {
  const element = createButton(label, "", () => selectCharts(secs, scope));
  setAttribute(element, "aria-pressed", secs === range);
  element.dataset.secs = secs;
  return element;
});
$("time-ranges").append(...rangeButtons);
$("scope").addEventListener("change", () => selectCharts(range, $("scope").value));
for (const chart of CHARTS) createChart(chart);
/* Charts are drawn for a fixed width. */
new ResizeObserver(() => { if (chartData && snapshot) drawCharts(); }).observe($("charts"));

/* Responses for another range or worker are dropped. */
function selectCharts(secs, worker) {
  range = secs;
  scope = worker;
  chartData = fleetData = null;
  fetchedAt = -Infinity;
  fetchNumber += 1;
  for (const element of rangeButtons) setAttribute(element, "aria-pressed", Number(element.dataset.secs) === range);
  if ($("scope").value !== scope) $("scope").value = scope;
  if (snapshot) renderCharts();
}
async function fetchHistory() {
  const number = fetchNumber;
  fetchedAt = performance.now();
  const query = `history?secs=${range}`, ofWorker = scope && scope !== THIS_PROXY;
  const url = ofWorker ? `${query}&worker=${encodeURIComponent(scope)}` : !scope && inCluster() ? `${query}&of=cluster` : query;
  /* A worker's series cover this proxy only, so the fleet is compared through this proxy, too. */
  const [own, total] = await Promise.all([callApi("GET", url), ofWorker ? callApi("GET", query) : null]);
  if (number !== fetchNumber || !snapshot) return;
  if (own.status === 404) { selectCharts(range, ""); return; }
  if (!own.ok) return;
  chartData = dropIncompleteStep(own.body);
  fleetData = total?.ok ? dropIncompleteStep(total.body) : null;
  drawCharts();
}
/* The current step is incomplete if steps are short: reports of some workers are missing. */
function dropIncompleteStep(body) {
  if (body.step_secs < 10) for (const series of Object.values(body.series)) series[series.length - 1] = null;
  return body;
}
clearFunctions.push(() => {
  chartData = fleetData = null;
  fetchedAt = -Infinity;
  fetchNumber += 1;
  scope = "";
  $("scope").replaceChildren();
  $("scope").renderedKey = undefined;
  $("chart-values").replaceChildren();
  setText($("traffic-summary"), "");
  for (const chart of CHARTS) {
    chart.svg.removeAttribute("aria-label");
    chart.axes.replaceChildren();
    chart.operations.replaceChildren();
    for (const value of chart.values) setText(value, "");
    for (const { area, line } of chart.paths) for (const path of [area, line]) path?.removeAttribute("d");
    chart.fleetLine.removeAttribute("d");
  }
});

function createChart(chart) {
  chart.svg = createSvgElement("svg", { role: "img", tabindex: "0" });
  chart.axes = createSvgElement("g", {});
  chart.operations = createSvgElement("g", {});
  chart.crosshair = createSvgElement("line", { class: "crosshair", y1: 4, y2: BOTTOM, visibility: "hidden" });
  chart.fleetLine = createSvgElement("path", { class: "line fleet-line" });
  chart.svg.append(chart.operations, chart.axes, chart.fleetLine);
  chart.paths = chart.lines.map(([, , kind, filled]) => {
    const area = filled ? createSvgElement("path", { class: `area ${kind}` }) : null;
    const line = createSvgElement("path", { class: `line ${kind}` });
    if (area) chart.svg.append(area);
    chart.svg.append(line);
    return { area, line };
  });
  chart.svg.append(chart.crosshair);
  chart.time = createElement("span", "muted");
  chart.values = [];
  const legend = createElement("div", "legend", ...chart.lines.map(([, label, kind]) => {
    chart.values.push(createElement("b"));
    return createElement("span", "", createElement("i", `swatch ${kind}`), label + " ", chart.values.at(-1));
  }), chart.time);
  $("charts").append(createElement("div", "chart", createElement("h3", "", chart.name), legend, chart.svg));
  chart.svg.addEventListener("pointermove", (event) => {
    const box = chart.svg.getBoundingClientRect();
    moveCrosshair((event.clientX - box.x - LEFT) / (box.width - LEFT - RIGHT));
  });
  chart.svg.addEventListener("pointerleave", () => moveCrosshair(null));
  chart.svg.addEventListener("blur", () => moveCrosshair(null));
  chart.svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    moveCrosshair(Math.min(1, Math.max(0, (crosshair ?? 1) + step * (event.shiftKey ? 10 : 1) / 179)));
  });
}
function moveCrosshair(at) {
  crosshair = at === null || at < 0 || at > 1 ? null : at;
  if (chartData) drawCharts();
}
/* The next round number, so that an axis rarely changes. */
function axisMaximum(value, minimum) {
  if (value <= minimum) return minimum;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value);
}
/* Runs each second: fetches data that is due, which is drawn when it arrives. */
function renderCharts() {
  if (scope === THIS_PROXY && !inCluster()) selectCharts(range, "");
  replaceIfChanged($("scope"), [snapshot.fleet.map((worker) => worker.id), inCluster()], () => [
    ...inCluster() ? [new Option("the fleet, through all proxies", ""), new Option("the fleet, through this proxy", THIS_PROXY)] : [new Option("the fleet", "")], ...snapshot.fleet.map((worker) => new Option(worker.display_id ?? shortUrl(worker.url), worker.id)),
  ]);
  if ($("scope").value !== scope) $("scope").value = scope;
  const due = chartData ? Math.min(chartData.step_secs, 30) * 1000 : 1500;
  if (performance.now() - fetchedAt > due) fetchHistory();
  setText($("traffic-summary"), snapshot.metrics === false ? METRICS_OFF : trafficText());
}
/* Figures of the same time range and worker as the charts. */
function trafficText() {
  const text = (total, failed, span) => `${pluralize(total, "request")}, ${pluralize(failed, "error")} in ${span}`;
  if ((scope === THIS_PROXY || !scope && !inCluster()) && range === HISTORY_SECS) return text(sumOfLastSecs("requests", range), sumOfLastSecs("errors", range), "15 min");
  if (!chartData) return "";
  const sum = (name) => Math.round(chartData.series[name].filter(hasValue).reduce((total, value) => total + value * chartData.step_secs, 0));
  return text(sum("requests_per_sec"), sum("errors_per_sec"), RANGES.find(([secs]) => secs === range)[1]);
}
function drawCharts() {
  setText($("traffic-summary"), snapshot.metrics === false ? METRICS_OFF : trafficText());
  const step = chartData.step_secs, end = chartData.from + chartData.secs;
  const start = Math.max(chartData.from, Math.min(end - MIN_SPAN_SECS, firstDataTime()));
  const length = chartData.series.in_flight.length;
  const selected = crosshair === null ? null : Math.min(length - 1, Math.floor((start - chartData.from + crosshair * (end - start)) / step));
  for (const chart of CHARTS) drawChart(chart, start, end, step, selected);
  replaceIfChanged($("chart-values"), chartData.from + chartData.secs + scope, () => [createElement("table", "", createElement("thead", "", createElement("tr", "", ...["Series", "Last", "Mean", "Max"].map((name) => createElement("th", "", name)))),
    createElement("tbody", "", ...CHARTS.flatMap((chart) => chart.lines.map(([name, label]) => {
      const values = chartData.series[name].filter(hasValue);
      const mean = values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
      return createElement("tr", "", createElement("td", "", `${chart.name}, ${label}`), ...[latestValue(name), mean, values.length ? Math.max(...values) : null].map((value) => createElement("td", "", chart.unit(value))));
    }))))]);
}
/* The current step may have no value yet. */
const latestValue = (name) => chartData.series[name].at(-1) ?? chartData.series[name].at(-2) ?? null;

/* Charts start no earlier than the proxy: otherwise they would be mostly empty after a restart. */
const MIN_SPAN_SECS = 120;
function firstDataTime() {
  const at = Object.values(chartData.series).map((values) => values.findIndex(hasValue)).filter((each) => each >= 0);
  return chartData.from + Math.min(...at, chartData.secs / chartData.step_secs) * chartData.step_secs;
}
function drawChart(chart, start, end, step, selected) {
  const width = Math.max(120, chart.svg.clientWidth || 400);
  setAttribute(chart.svg, "viewBox", `0 0 ${width} ${HEIGHT}`);
  const x = (at) => LEFT + ((width - LEFT - RIGHT) * (at - start)) / (end - start);
  const fleetValues = chart.comparesFleet && fleetData ? fleetData.series[chart.lines.at(-1)[0]] : [];
  const values = [...fleetValues, ...chart.lines.flatMap(([name]) => chartData.series[name])].filter(hasValue);
  const maximum = axisMaximum(Math.max(0, ...values), chart.minimum);
  const y = (value) => BOTTOM - ((BOTTOM - TOP) * value) / maximum;
  drawAxes(chart, width, x, y, { start, end, maximum });
  if (!values.length && chart.noData) {
    chart.noData().split("; ").forEach((line, at) => {
      const label = createSvgElement("text", { class: "axis", x: (width + LEFT) / 2, y: 40 + 16 * at, "text-anchor": "middle" });
      label.textContent = line;
      chart.axes.append(label);
    });
  }
  const coordinates = (series) => series.map((value, at) => [x(chartData.from + (at + 0.5) * step), hasValue(value) ? y(value) : null]);
  setAttribute(chart.fleetLine, "d", linePath(coordinates(fleetValues)));
  chart.lines.forEach(([name], index) => {
    const { area, line } = chart.paths[index], series = chartData.series[name], points = coordinates(series);
    setAttribute(line, "d", linePath(points));
    if (area) setAttribute(area, "d", areaPath(points));
    setText(chart.values[index], chart.unit(selected === null ? latestValue(name) : series[selected]));
  });
  setAttribute(chart.crosshair, "visibility", selected === null ? "hidden" : "visible");
  const at = selected === null ? null : chartData.from + (selected + 0.5) * step;
  if (at !== null) for (const name of ["x1", "x2"]) setAttribute(chart.crosshair, name, x(at).toFixed(1));
  setText(chart.time, at === null ? "" : formatTime(at, step < 60));
  setAttribute(chart.time, "title", at === null ? "" : formatUtc(at));
  const label = RANGES.find(([secs]) => secs === range)[1];
  const now = chart.lines.map(([name, title]) => `${title} ${hasValue(latestValue(name)) ? chart.unit(latestValue(name)) : "no data"}`).join(", ");
  setAttribute(chart.svg, "aria-label", `${chart.name} of ${scope === THIS_PROXY ? "this proxy" : scope ? shortUrl(decodeURIComponent(scope)) : "the fleet"} over the last ${label}; now ${now}; maximum ${values.length ? chart.unit(Math.max(...values)) : "no data"}`);
}
const TICK_STEPS = [30, 60, 180, 360, 600, 1200, 3600, 7200];
function drawAxes(chart, width, x, y, { start, end, maximum }) {
  const step = TICK_STEPS.find((secs) => (end - start) / secs <= (width > 300 ? 6 : 3));
  const halfLabel = step < 60 ? 27 : 18, ticks = []; // half the width of a label in pixels: labels that do not fit are omitted
  for (let at = Math.ceil(start / step) * step; at <= end - step / 9; at += step) if (x(at) > LEFT + 14 && x(at) + halfLabel <= width) ticks.push(at);
  chart.axes.replaceChildren(
    ...[0, 0.5, 1].flatMap((fraction) => {
      const height = y(maximum * fraction), label = createSvgElement("text", { class: "axis", x: LEFT - 5, y: height + 4, "text-anchor": "end" });
      label.textContent = fraction ? chart.unit(maximum * fraction) : "0";
      return [createSvgElement("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: height, y2: height }), label];
    }),
    ...ticks.map((at) => {
      const label = createSvgElement("text", { class: "axis", x: x(at), y: BOTTOM + 15, "text-anchor": "middle" });
      label.textContent = formatTime(at, step < 60);
      return label;
    }));
  chart.operations.replaceChildren(...operationTimes().filter((each) => each.to > start).map((each) => {
    const from = Math.max(start, each.from);
    return createSvgElement("rect", { class: "operation", x: x(from), y: TOP, width: Math.max(2, x(Math.min(end, each.to)) - x(from)), height: BOTTOM - TOP });
  }));
}
/* A path through the points, with a gap for a missing value. A point between two gaps is a dash. */
function linePath(coordinates) {
  let path = "";
  coordinates.forEach(([x, y], index) => {
    if (y === null) return;
    const [before, after] = [index - 1, index + 1].map((at) => hasValue(coordinates[at]?.[1]));
    path += `${before ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}${before || after ? "" : "h3"}`;
  });
  return path;
}
function areaPath(coordinates) {
  let path = "", from = null, lastX = null;
  const end = () => { if (from !== null) path += `L${lastX.toFixed(1)} ${BOTTOM}L${from.toFixed(1)} ${BOTTOM}Z`; from = null; };
  for (const [x, y] of coordinates) {
    if (y === null) { end(); continue; }
    path += from === null ? `M${x.toFixed(1)} ${y.toFixed(1)}` : `L${x.toFixed(1)} ${y.toFixed(1)}`;
    if (from === null) from = x;
    lastX = x;
  }
  end();
  return path;
}
