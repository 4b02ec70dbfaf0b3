/* The table of workers, which can be searched, sorted and grouped by model. Only visible rows are built, and they are reused, so
   that a fleet of hundreds costs as little as a small one. */
const MAX_ROWS = 25, ROWS_OF_LARGE_FLEET = 15;
const rowsById = new Map(), sparklines = new Map(), expandedWorkers = new Set(), expandedModels = new Set();
const tableView = { sortedBy: "", descending: false, moreRows: 0 };
let maxFirstTokenMs = 1;  // longest time to the first token of all workers
/* When rows last moved: a click shortly after may have been meant for another button. */
let rowsMovedAt = -Infinity;
const SETTLE_MS = 600;
const COLUMNS = [
  ["name", "Worker", "col-name", (worker) => worker.display_id ?? worker.url],
  ["state", "State, reason", "col-state", (worker) => severity(worker)],
  ["load", "In flight", "col-load num", (worker) => worker.in_flight],
  ["rate", "Req/s", "col-rate num", totalRate],
  ["first", "First token p50 · p99", "col-first-token", (worker) => worker.first_p50_ms],
  ["tokens", "Tokens/s", "col-tokens num", totalTokens],
  ["cache", "Cache", "col-cache num", (worker) => worker.minute?.cache_hit_ratio],
  ["errors", "Errors", "col-errors num", totalErrors],
  ["weights", "Weights", "col-weights", (worker) => worker.weight_version],
];
const DESCENDING_FIRST = new Set(["state", "load", "rate", "first", "tokens", "cache", "errors"]);

$("worker-columns").append(...COLUMNS.map(([name, label, className]) => {
  const head = createElement("th", className, createButton(label, "sort-button", () => sortBy(name)));
  head.scope = "col";
  head.dataset.by = name;
  return head;
}), Object.assign(createElement("th", "col-actions", "Actions"), { scope: "col" }));
function sortBy(name) {
  if (tableView.sortedBy !== name) Object.assign(tableView, { sortedBy: name, descending: DESCENDING_FIRST.has(name) });
  else if (tableView.descending === DESCENDING_FIRST.has(name)) tableView.descending = !tableView.descending;
  else tableView.sortedBy = "";
  if (snapshot) render();
}
for (const id of ["worker-search", "problems-only"]) $(id).addEventListener("input", () => { tableView.moreRows = 0; if (snapshot) render(); });
$("by-model").addEventListener("change", () => snapshot && render());
$("sort").append(new Option("sort: as configured", ""), ...COLUMNS.map(([name, label]) => new Option(`sort: ${label.toLowerCase()}`, name)));
$("sort").addEventListener("change", () => { Object.assign(tableView, { sortedBy: $("sort").value, descending: DESCENDING_FIRST.has($("sort").value) }); if (snapshot) render(); });
clearOnSignOut("worker-rows", "fleet-summary", "more-workers");
clearFunctions.push(() => { rowsById.clear(); sparklines.clear(); expandedWorkers.clear(); expandedModels.clear(); tableView.moreRows = 0; });

/* Higher is more urgent. */
function severity(worker) {
  const [, kind, isOut] = workerState(worker);
  return (isOut ? 4 : 0) + (kind === "error" ? 8 : kind === "warning" ? 2 : 0) + (isSilent(worker) ? 2 : 0) + (totalErrors(worker) ? 1 : 0);
}
/* Searches all text of a worker's row except figures. */
function matchesSearch(worker, terms, slow) {
  const text = [worker.url, worker.display_id, worker.model, worker.role, worker.origin, workerState(worker)[0], slowText(worker, slow), reasonText(worker), worker.why, worker.health, worker.overloaded && "overloaded", worker.last_error, worker.weight_version, callerText(worker), subtitle(worker), ...worker.adapters ?? []].join(" ").toLowerCase();
  return terms.every((term) => text.includes(term));
}
function visibleWorkers(fleet, slow) {
  const terms = $("worker-search").value.toLowerCase().split(/\s+/).filter(Boolean), problemsOnly = $("problems-only").checked;
  const list = fleet.filter((worker) => matchesSearch(worker, terms, slow) && (!problemsOnly || severity(worker) || slow.has(worker.id)));
  const column = COLUMNS.find(([name]) => name === tableView.sortedBy);
  /* In a large fleet workers with problems come first. */
  const value = column?.[3] ?? (fleet.length > MAX_ROWS ? (worker) => severity(worker) + (slow.has(worker.id) ? 2 : 0) : null);
  if (!value) return list;
  const descending = column ? tableView.descending : true;
  const order = (a, b) => typeof a === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  return list.map((worker) => [worker, value(worker)]).sort(([, a], [, b]) => {
    if (!hasValue(a) || !hasValue(b)) return hasValue(b) - hasValue(a);
    return descending ? order(b, a) : order(a, b);
  }).map(([worker]) => worker);
}
function renderFleet(fleet, slow) {
  const maxRows = (fleet.length > MAX_ROWS ? ROWS_OF_LARGE_FLEET : MAX_ROWS) + tableView.moreRows;
  maxFirstTokenMs = Math.max(1, ...fleet.map((each) => each.first_p99_ms ?? each.first_p50_ms ?? 0));
  const list = visibleWorkers(fleet, slow), isGrouped = $("by-model").checked && !$("by-model-label").hidden;
  const models = new Set(fleet.map((worker) => worker.model ?? ""));
  setVisible($("by-model-label"), models.size > 1);
  setVisible($("problems-only-label"), fleet.length > 8);
  for (const head of $("worker-columns").children) if (head.dataset.by) setAttribute(head, "aria-sort", head.dataset.by !== tableView.sortedBy ? "none" : tableView.descending ? "descending" : "ascending");
  if ($("sort").value !== tableView.sortedBy) $("sort").value = tableView.sortedBy;
  const rows = [];
  if (isGrouped) for (const group of groupByModel(list)) rows.push(...rowsOfGroup(group, slow));
  else rows.push(...list.slice(0, maxRows).flatMap((worker) => rowsOfWorker(worker, slow)));
  arrangeRows(rows);
  const shown = new Set(rows.map((row) => row.dataset.worker));
  for (const id of rowsById.keys()) if (!shown.has(id)) { rowsById.delete(id); if (!fleet.some((worker) => worker.id === id)) { sparklines.delete(id); expandedWorkers.delete(id); } }
  const left = isGrouped ? 0 : list.length - Math.min(list.length, maxRows);
  replaceIfChanged($("more-workers"), [left > 0, Math.min(left, 50), list.length], () => left > 0 ? [
    createButton(`Show ${Math.min(left, 50)} more`, "", () => { tableView.moreRows += 50; render(); }), createButton(`Show all ${list.length}`, "", () => { tableView.moreRows = Infinity; render(); }),
  ] : []);
  const shownText = list.length < fleet.length || left ? `${list.length - left} of ${fleet.length} shown` : "";
  setText($("fleet-summary"), !fleet.length ? "none" : [shownText, inCluster() ? "last minute, all proxies; first token and cache of this one" : "figures of the last minute"].filter(Boolean).join("; "));
  setVisible($("no-workers"), !list.length);
  setText($("no-workers"), fleet.length ? "No matching workers." : "No workers yet.");
}
/* Puts the rows in this order; a row that keeps its place is not touched. */
function arrangeRows(rows) {
  const kept = new Set(rows), body = $("worker-rows");
  for (const element of [...body.children]) if (!kept.has(element)) { element.remove(); rowsMovedAt = performance.now(); }
  let next = body.firstElementChild;
  for (const element of rows) {
    if (element === next) { next = next.nextElementSibling; continue; }
    body.insertBefore(element, next);
    rowsMovedAt = performance.now();
  }
}
const groupRows = new Map();
function rowsOfGroup(group, slow) {
  const model = group[0].model ?? "";
  if (!groupRows.has(model)) {
    const row = createElement("tr", "group"), cell = createElement("th"), summary = createElement("span", "muted small");
    const button = createButton("", "disclosure", () => { if (!expandedModels.delete(model)) expandedModels.add(model); render(); });
    cell.colSpan = COLUMNS.length + 1;
    cell.append(button, " ", summary);
    row.append(cell);
    groupRows.set(model, { row, button, summary });
  }
  const { row, button, summary } = groupRows.get(model), open = expandedModels.has(model) || group.length <= 5;
  setText(button, `${open ? "▾" : "▸"} ${model || "any model"}`);
  setAttribute(button, "aria-expanded", open);
  const outCount = group.filter((worker) => !takesRequests(worker)).length, firstTokenTimes = group.map((worker) => worker.first_p50_ms).filter(hasValue);
  const sum = (value) => group.reduce((total, worker) => total + (value(worker) ?? 0), 0), errors = sum(totalErrors);
  setText(summary, [pluralize(group.length, "worker"), outCount && `${outCount} out of rotation`, `${formatNumber(sum((worker) => worker.in_flight))} in flight`, `${formatNumber(sum(totalRate))} req/s`, firstTokenTimes.length && `first token p50 ${formatMillis(median(firstTokenTimes))}`, errors && pluralize(errors, "error")].filter(Boolean).join(" · "));
  return [row, ...open ? group.flatMap((worker) => rowsOfWorker(worker, slow)) : []];
}
function rowsOfWorker(worker, slow) {
  if (!rowsById.has(worker.id)) rowsById.set(worker.id, createRow(worker.id));
  const row = rowsById.get(worker.id);
  renderRow(row, worker, slow);
  if (!expandedWorkers.has(worker.id)) return [row.element];
  row.details ??= createDetails(row);
  renderDetails(row, worker);
  return [row.element, row.details];
}
const slowText = (worker, slow) => isSilent(worker) ? `silent for ${formatDuration(worker.silent_secs)}` : slow.has(worker.id) ? `slow, ${slow.get(worker.id).times.toFixed(1)} ×` : "";
function subtitle(worker) {
  const adapters = worker.adapters ?? [];
  return [worker.role && worker.role !== "regular" && worker.role, worker.model, adapters.length && `adapters ${adapters.filter((each) => !each.includes(":")).join(", ") || adapters.join(", ")}`, worker.launch?.state && worker.launch.state !== "ready" && `process ${worker.launch.state}`, worker.launch?.restarts && pluralize(worker.launch.restarts, "restart"), worker.kv_mode && worker.kv_mode !== "off" && `KV ${worker.kv_mode}`].filter(Boolean).join(" · ") || worker.origin;
}
function reasonText(worker) {
  const caller = worker.disabled && worker.disabled_by?.by;
  return isPaused(worker) ? `${pauseText({ ...worker.paused, at: null })}; omni-proxy weights continue`
    : [reasonWithoutState((worker.why ?? "").replace(ERROR_PREFIX, ""), workerState(worker)[0]), caller && !(worker.why ?? "").includes(caller) && `by ${caller}`].filter(Boolean).join(" · ");
}
function renderRow(row, worker, slow) {
  const [name, kind, isOut] = workerState(worker);
  const slowness = slowText(worker, slow), isSlow = Boolean(slowness);
  row.worker = worker;
  setClass(row.element, [isSlow && kind === "ok" ? "warning" : kind, isOut && "out", isSlow && "slow"].filter(Boolean).join(" "));
  setText(row.name, worker.display_id ?? shortUrl(worker.url));
  setAttribute(row.name, "aria-expanded", expandedWorkers.has(worker.id));
  setAttribute(row.name, "title", `${worker.url}: details`);
  setText(row.origin, subtitle(worker));
  setText(row.badge, name);
  setClass(row.badge, "badge " + kind);
  setVisible(row.slow, isSlow);
  setText(row.slow, slowness);
  const startedAt = isPaused(worker) ? worker.paused.at : "state_since" in worker ? worker.state_since : worker.since;
  setText(row.since, startedAt ? `for ${formatDuration(toSeconds(snapshot.at) - toSeconds(startedAt))}` : "");
  setAttribute(row.since, "title", startedAt ? `since ${formatDateTime(startedAt)} (${formatUtc(startedAt)})` : "");
  const reason = reasonText(worker);
  setText(row.reason, reason);
  setAttribute(row.reason, "title", reason);
  setText(row.load, worker.max_inflight ? `${formatNumber(worker.in_flight)} of ${formatNumber(worker.max_inflight)}` : formatNumber(worker.in_flight));
  setText(row.queue, hasValue(worker.minute?.waiting) ? `queue ${formatNumber(worker.minute.waiting)}` : worker.sessions ? pluralize(worker.sessions, "session") : "");
  setAttribute(row.load, "title", ownShareText(worker, formatNumber(worker.in_flight - (worker.elsewhere?.in_flight ?? 0))));
  setText(row.rate, formatNumber(totalRate(worker)));
  setAttribute(row.rate, "title", ownShareText(worker, formatNumber(worker.rate)));
  setText(row.errors, formatNumber(totalErrors(worker)));
  setAttribute(row.errors, "title", ownShareText(worker, formatNumber(worker.errors)));
  setClass(row.errors, totalErrors(worker) ? "error" : "");
  setText(row.first, hasValue(worker.first_p50_ms) ? `${formatMillis(worker.first_p50_ms)} · ${formatMillis(worker.first_p99_ms)}` : "no responses");
  setClass(row.first, hasValue(worker.first_p50_ms) ? "value" : "value muted small");
  row.p50.style.width = (100 * (worker.first_p50_ms ?? 0)) / maxFirstTokenMs + "%";
  row.p99.style.width = (100 * (worker.first_p99_ms ?? 0)) / maxFirstTokenMs + "%";
  renderSparkline(row.sparkline, worker);
  setText(row.tokens, formatNumber(totalTokens(worker)));
  setText(row.prompts, hasValue(worker.minute?.input_tokens_per_sec) ? `${formatNumber(worker.minute.input_tokens_per_sec)} in` : "");
  setText(row.cache, formatPercent(worker.minute?.cache_hit_ratio));
  setText(row.label, worker.weight_version ?? "–");
  setAttribute(row.label, "title", worker.weight_version ?? "unknown");
  setText(row.epoch, worker.weight_epoch ? `epoch ${worker.weight_epoch}` : "");
  setText(row.toggle, worker.disabled || worker.drain ? "Enable" : "Disable");
  for (const each of ["toggle", "drain", "revive", "remove"]) setAttribute(row[each], "aria-label", `${row[each].textContent} ${row.name.textContent}`);
  setPermission(row.toggle, "operate");
  setPermission(row.drain, "operate", !worker.drain);
  setPermission(row.revive, "operate", worker.health !== "healthy");
  setPermission(row.remove, "operate");
}
function createRow(id) {
  const row = { id };
  const part = (name, tag, className) => row[name] = createElement(tag, className);
  const button = (name, label, className, action) => row[name] = createButton(label, className, (event, element) => {
    const isPointer = event.detail > 0;
    if (isPointer && performance.now() - rowsMovedAt < SETTLE_MS) notify("The list has just moved. Click again if you meant this worker.", "warning");
    else action(row.worker, element);
  });
  const head = createElement("th", "", row.name = createButton("", "name truncate", () => toggleDetails(id)), part("origin", "div", "muted small truncate"));
  head.scope = "row";
  row.sparkline = createSvgElement("svg", { class: "sparkline", viewBox: "0 0 72 22", "aria-hidden": "true" });
  row.sparkline.append(createSvgElement("path", {}));
  const cells = [
    createElement("td", "state", createElement("div", "badges", part("badge", "span", "badge"), part("slow", "span", "badge slow"), part("since", "span", "muted small")), part("reason", "div", "truncate small")),
    createElement("td", "num", part("load", "span"), part("queue", "div", "muted small")),
    createElement("td", "num", part("rate", "span")),
    createElement("td", "first-token", createElement("div", "first-token-value", part("first", "span", "value"), row.sparkline), createElement("div", "bar", part("p99", "i", "p99"), part("p50", "i", "fill"))),
    createElement("td", "num", part("tokens", "span"), part("prompts", "div", "muted small")),
    createElement("td", "num", part("cache", "span")),
    createElement("td", "num", part("errors", "span")),
    createElement("td", "", part("label", "div", "truncate"), part("epoch", "div", "muted small")),
    createElement("td", "actions-cell", createElement("div", "actions",
      button("toggle", "Disable", "toggle", toggleDisabled), button("drain", "Drain", "", drainWorker),
      button("revive", "Revive", "", reviveWorker), button("remove", "Remove", "danger", removeWorker))),
  ];
  COLUMNS.slice(2).forEach(([, label], at) => { cells[at + 1].dataset.name = label; });
  row.element = createElement("tr", "", head, ...cells);
  row.element.dataset.worker = id;
  return row;
}
/* Opens a worker's row, scrolls to it and shows its charts. */
function showWorker(id) {
  expandedWorkers.add(id);
  $("worker-search").value = "";
  $("problems-only").checked = false;
  expandedModels.add(snapshot.fleet.find((worker) => worker.id === id)?.model ?? "");
  if (!rowsById.has(id)) tableView.moreRows = Infinity;
  selectCharts(range, id);
  render();
  rowsById.get(id)?.element.scrollIntoView({ block: "center" });
  rowsById.get(id)?.name.focus();
}
function toggleDetails(id) {
  if (!expandedWorkers.delete(id)) expandedWorkers.add(id);
  render();
}
function renderSparkline(svg, worker) {
  const values = sparklines.get(worker.id) ?? [];
  if (values.at !== snapshot.at) values.push(worker.first_p50_ms ?? null);
  values.at = snapshot.at;
  if (values.length > 120) values.splice(0, values.length - 120);
  sparklines.set(worker.id, values);
  const top = Math.max(1, ...values.map((value) => value ?? 0)) * 1.1, step = 70 / 119;
  const from = 71 - (values.length - 1) * step;
  setAttribute(svg.firstChild, "d", linePath(values.map((value, at) => [from + at * step, hasValue(value) ? 21 - (20 * value) / top : null])));
}

/* ---- details of a row ---- */
function createDetails(row) {
  const element = createElement("tr", "worker-details"), cell = createElement("td");
  cell.colSpan = COLUMNS.length + 1;
  row.properties = createElement("div", "columns");
  row.weightField = createNumberField("Weight", 1, 1000000);
  row.limitField = createNumberField("Max in flight (0: no limit)", 0, 1000000);
  const saveButton = createButton("Save", "primary", () => saveLimits(row.worker, row.weightField.lastChild, row.limitField.lastChild));
  row.save = saveButton;
  cell.append(row.properties, createElement("div", "toolbar", row.weightField, row.limitField, saveButton, createElement("span", "grow"),
    createButton("Show charts", "", () => { selectCharts(range, row.id); $("traffic").scrollIntoView({ block: "start" }); $("scope").focus(); })));
  element.append(cell);
  element.dataset.worker = row.id;
  return element;
}
function createNumberField(label, minimum, maximum) {
  const input = createElement("input", "number-field");
  Object.assign(input, { type: "number", min: minimum, max: maximum, step: 1, required: true });
  input.addEventListener("input", () => { input.touched = true; });
  return createElement("label", "small", label + " ", input);
}
function renderDetails(row, worker) {
  setClass(row.details, ["worker-details", ...["ok", "warning", "error", "info"].filter((each) => row.element.classList.contains(each))].join(" "));
  for (const [field, value] of [[row.weightField, worker.weight], [row.limitField, worker.max_inflight ?? 0]]) {
    if (!field.lastChild.touched && field.lastChild.value !== String(value)) field.lastChild.value = value;
  }
  setPermission(row.save, "operate");
  const minute = worker.minute ?? {}, load = worker.engine_load, caller = callerText(worker);
  const slowness = worker.slow?.text;
  const key = [worker.url, worker.state_since, caller.replace(/for \S+ \S+/, ""), worker.in_flight, worker.routed, worker.failed, worker.rate, worker.elsewhere, minute, load?.waiting, worker.kv_mode, worker.ranks_in_flight, worker.last_error, slowness, cordonText(worker)];
  replaceIfChanged(row.properties, key, () => [
    descriptionList([
      ["URL", worker.url], ["Model", worker.model], ["Adapters", (worker.adapters ?? []).join(", ")], ["Origin", worker.origin],
      ["Role", worker.role !== "regular" && `${worker.role}${partnersText(worker)}`],
      ["Disabled since", worker.disabled && worker.disabled_by?.at && createTime(worker.disabled_by.at)], ["Disabled by", worker.disabled && worker.disabled_by?.by],
      ["Reason", (worker.why ?? "").replace(ERROR_PREFIX, "")], ["Held by", cordonText(worker)], ["Last error", (worker.last_error ?? "").replace(ERROR_PREFIX, "")],
    ]),
    descriptionList([
      ["Slow", slowness],
      ["Between tokens, p50", hasValue(minute.between_p50_ms) && formatMillis(minute.between_p50_ms)],
      ["Through this proxy", worker.elsewhere && `${formatNumber(worker.in_flight - worker.elsewhere.in_flight)} of ${formatNumber(worker.in_flight)} in flight, ${formatNumber(worker.rate)} of ${formatNumber(totalRate(worker))} req/s`],
      ["Prompt tokens/s", hasValue(minute.input_tokens_per_sec) && formatNumber(minute.input_tokens_per_sec)],
      ["Engine", load && `${hasValue(load.waiting) ? `${formatNumber(load.waiting)} waiting` : ""}${hasValue(load.kv_usage) ? `, KV cache ${formatPercent(load.kv_usage)} full` : ""}${load.state !== "ok" ? `, ${load.state}` : ""}`.replace(/^, /, "")],
      ["KV events", worker.kv_mode && worker.kv_mode !== "off" && `${worker.kv_mode}${worker.kv_reason ? `: ${worker.kv_reason}` : ""}`],
      ["Ranks, in flight", (worker.ranks_in_flight ?? []).map((number, at) => `${at}: ${formatNumber(number)}`).join(" · ")],
      ["Sessions", worker.sessions || null], ["Requests since added", worker.routed && `${formatNumber(worker.routed)}, ${formatNumber(worker.failed)} failed`],
    ]),
  ]);
}
/* The worker's cordons, since when, and who began the operation that each belongs to. */
function cordonText(worker) {
  const weights = snapshot.weights ?? {}, since = (at) => at ? ` since ${formatDateTime(at)}` : "";
  const operations = { updating: weights.operation ?? weights.sync?.owner, rollout: activeRollout(), paused: worker.paused && { caller: worker.paused.by } };
  return (worker.held_by ?? []).map((name) => `${name}${since(worker.held_since?.[name])}${operations[name]?.caller ? ` by ${operations[name].caller}` : ""}`).join(", ");
}
/* The partners of a prefill or decode worker. */
function partnersText(worker) {
  const other = worker.role === "prefill" ? "decode" : "prefill";
  const partners = (snapshot.fleet ?? []).filter((each) => each.role === other && (each.model ?? "") === (worker.model ?? ""));
  return `; ${partners.length ? `${other}: ${partners.slice(0, 4).map((each) => shortUrl(each.url)).join(", ")}${partners.length > 4 ? ` and ${partners.length - 4} more` : ""}` : `no ${other} worker`}`;
}
