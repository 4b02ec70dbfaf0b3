/* The header, the problems with their buttons, and the figures of the last minute. */
function render() {
  const fleet = snapshot.fleet ?? [];
  const serving = fleet.filter(takesRequests).length;
  const [label, kind] = snapshot.leaving ? ["Shutting down: accepts no new requests", "warning"]
    : snapshot.reason === "paused" ? ["Not ready: all workers are PAUSED", "error"]
    : !serving ? [fleet.length ? "Not ready: no worker takes requests" : "Not ready: there is no worker", "error"]
    : serving < fleet.length ? [`Serving with ${serving} of ${fleet.length} workers`, "warning"]
    : [`Serving with all ${pluralize(serving, "worker")}`, "ok"];
  setText($("state"), label);
  setClass($("state"), kind);
  setText($("connection"), "live · " + formatTime(snapshot.at));
  setAttribute($("connection"), "title", formatUtc(snapshot.at));
  setText($("key-info"), snapshot.reader?.name ? `${snapshot.reader.name}, role ${snapshot.reader.role}` : "");
  document.title = `${serving}/${fleet.length} up · omni-proxy`;
  const slow = slowWorkers(fleet);
  renderAlerts(fleet, serving, slow);
  renderTiles(fleet, serving);
  renderFleet(fleet, slow);
  dropNotification(fleet);
  renderProxies();
  renderCharts();
  renderWeights();
  renderConfig();
  renderCallers();
  renderRequests();
  renderChat(fleet);
  setPermission($("add-worker"), "operate");
  setText($("footer"), [snapshot.version && `omni-proxy ${snapshot.version}`, snapshot.pid && `pid ${snapshot.pid}`, hasValue(snapshot.uptime_secs) && `up ${formatDuration(snapshot.uptime_secs)}`, `time zone ${Intl.DateTimeFormat().resolvedOptions().timeZone}`].filter(Boolean).join(" · "));
}

function renderAlerts(fleet, serving, slow) {
  const all = [];
  const add = (kind, title, text, ...buttons) => all.push([kind, title, text, buttons]);
  const reload = snapshot.last_reload ?? {};
  if (snapshot.leaving) add("warning", "The proxy is shutting down", "it finishes requests in flight");
  if (!fleet.length) add("error", "There is no worker", "add one here, or with omni-proxy workers add URL", ["Add a worker", "operate", () => openWorkerDialog()]);
  if (reload.error) add("error", "The last reload was refused", firstProblem(reload.error) + "; the previous configuration stays active");
  if (snapshot.state_error) add("error", "Changes over HTTP can't be saved", snapshot.state_error);
  const paused = new Map();
  for (const worker of fleet.filter(isPaused)) paused.set(pauseText(worker.paused), (paused.get(pauseText(worker.paused)) ?? 0) + 1);
  for (const [text, number] of paused) add("error", `PAUSED: ${number} of ${pluralize(fleet.length, "worker")}`, `${text}${text ? "; " : ""}end it with Continue or: omni-proxy weights continue`, ["Continue", "weights", continueAll]);
  const outOfRotation = fleet.filter((worker) => !isPaused(worker)).map((worker) => [worker, ...workerState(worker)]).filter(([, , , isOut]) => isOut);
  outOfRotation.sort((a, b) => (b[2] === "error") - (a[2] === "error"));
  for (const [worker, name, kind] of outOfRotation.slice(0, 5)) {
    const uncertain = worker.held_by?.includes("uncertain");
    const button = worker.disabled ? ["Enable", "operate", () => setDisabled(worker, false)] : uncertain ? ["Resolve", "weights", resolveAll] : null;
    const caller = worker.disabled && !worker.in_flight && kind !== "error" ? callerText(worker) : "";
    add(kind, `${shortUrl(worker.url)} is out of rotation`, caller ? `${name} ${caller}` : (worker.why || name).replace(ERROR_PREFIX, ""), ...button ? [button] : []);
  }
  if (outOfRotation.length > 5) add("warning", `${outOfRotation.length - 5} more are out of rotation`, "");
  const silent = fleet.filter(isSilent);
  for (const worker of silent.slice(0, 5)) add("warning", `${shortUrl(worker.url)} is silent`, `${formatNumber(worker.in_flight)} in flight, no response data for ${formatDuration(worker.silent_secs)}`);
  if (silent.length > 5) add("warning", `${silent.length - 5} more are silent`, "");
  const slowServing = [...slow.values()].filter(({ worker }) => !workerState(worker)[2]).sort((a, b) => b.times - a.times);
  for (const each of slowServing.slice(0, 5)) {
    add("warning", `${shortUrl(each.worker.url)} is slow`, each.text, ["Details", "read", () => showWorker(each.worker.id)]);
  }
  if (slowServing.length > 5) add("warning", `${slowServing.length - 5} more are slow`, "");
  const failed = sumOfLastSecs("errors", 60), requests = sumOfLastSecs("requests", 60);
  if (failed >= 3 && failed * 100 >= requests) add("error", "Requests are failing", `${formatNumber(failed)} of ${formatNumber(requests)} in the last minute${mostFrequentFailure()}`);
  if (snapshot.cluster && !snapshot.cluster.connected) add("error", "The cluster store is disconnected", `${snapshot.cluster.error ?? "connecting"}; figures cover this proxy only`);
  const versions = new Set([snapshot.version, ...clusterPeers().map((peer) => peer.version).filter(Boolean)]);
  if (versions.size > 1) add("warning", "The proxies have different versions", [...versions].join(", "));
  const refused = snapshot.refused_without_key_last_minute ?? 0;
  if (refused) add("warning", "Requests are refused", `${pluralize(refused, "request")} without a valid key in the last minute`);
  for (const group of groupByModel(fleet.filter((worker) => worker.routable && hasValue(worker.weight_version)))) {
    const labels = new Set(group.map((worker) => worker.weight_version));
    if (labels.size > 1 && !activeRollout()) add("warning", `The workers${group[0].model ? ` of ${group[0].model}` : ""} have different weight versions`, [...labels].join(", "));
  }
  const waiting = snapshot.admission?.waiting;
  if (waiting) add("warning", `${pluralize(waiting, "request")} queued`, serving ? "waiting for capacity" : "waiting for a worker");
  if (activeRollout()) add("info", `Rollout to ${activeRollout().weight_version}: ${activeRollout().state.replace("_", " ")}`, rolloutText(activeRollout()), ...rolloutButtons());
  else if (snapshot.weights?.operation) add("info", "A weight operation is running", operationText(snapshot.weights.operation));
  if (snapshot.weights?.sync?.owner) add("info", "A weight sync is open", syncText(snapshot.weights.sync), ["Abort", "weights", abortSync]);
  if (!all.length) add("ok", "No problems", fleet.length === 1 ? "the worker takes requests" : `all ${fleet.length} workers take requests`);
  const order = ["error", "warning", "info", "ok"];
  all.sort(([a], [b]) => order.indexOf(a) - order.indexOf(b));
  const heightBefore = $("problems").offsetHeight;
  const itemsBefore = new Map([...$("alerts").children].map((element) => [element.firstChild.textContent, element]));
  all.forEach(([kind, title, text, buttons], index) => {
    const element = itemsBefore.get(title) ?? createElement("li", "", createElement("b", "", title), createElement("span"), createElement("span", "alert-buttons"));
    itemsBefore.delete(title);
    setClass(element, kind);
    setText(element.children[1], text ? ": " + text : "");
    element.actions = buttons.map(([, , action]) => action);
    replaceIfChanged(element.lastChild, buttons.map(([label]) => label), () => buttons.map(([label], at) => createButton(label, "", () => element.actions[at]())));
    buttons.forEach(([, role], at) => setPermission(element.lastChild.children[at], role));
    if ($("alerts").children[index] !== element) $("alerts").insertBefore(element, $("alerts").children[index] ?? null);
  });
  for (const element of itemsBefore.values()) element.remove();
  if ($("problems").offsetHeight !== heightBefore) rowsMovedAt = performance.now();
}
/* The most frequent failure of the last minute. */
function mostFrequentFailure() {
  const causes = new Map();
  for (const request of snapshot.recent_ends ?? []) {
    if (requestKind(request) !== "error" || toSeconds(request.at) < toSeconds(snapshot.at) - 60) continue;
    const cause = [String(request.end).replaceAll("_", " "), request.status >= 500 && request.status, [request.prefill, request.worker].filter(Boolean).map(shortUrl).join(" › "), request.error].filter(Boolean).join(", ");
    causes.set(cause, (causes.get(cause) ?? 0) + 1);
  }
  const [mostFrequent] = [...causes].sort(([, a], [, b]) => b - a);
  return mostFrequent ? `; most often: ${mostFrequent[0]}` : "";
}
function firstProblem(error) {
  const problem = error.problems?.[0];
  if (!problem) return error.message ?? toText(error);
  const more = error.problems.length > 1 ? `, and ${error.problems.length - 1} more` : "";
  return `${problem.line ? `line ${problem.line}: ` : ""}${problem.path}: ${problem.reason}${problem.hint ? ` (${problem.hint})` : ""}${more}`;
}

const tiles = new Map();
clearFunctions.push(() => tiles.clear());
clearOnSignOut("alerts", "tiles", "footer", "key-info");
function setTile(name, value, kind = "", hint = "") {
  let element = tiles.get(name);
  if (!element) {
    element = createElement("dd");
    $("tiles").append(createElement("div", "", createElement("dt", "", name), element));
    tiles.set(name, element);
  }
  setText(element, value);
  setAttribute(element, "title", hint || value);
  setClass(element, kind);
}
function sumOfLastSecs(name, secs) {
  const from = toSeconds(snapshot.at) - secs;
  return points.filter((point) => point.at > from).reduce((sum, point) => sum + (point[name] ?? 0), 0);
}
function renderTiles(fleet, serving) {
  const now = points.at(-1) ?? {};
  const errors = clusterSum(sumOfLastSecs("errors", 60), "errors_last_minute");
  const minute = points.filter((point) => hasValue(point.first_p50_ms) && point.at > toSeconds(snapshot.at) - 60);
  setTile("Workers up", `${serving} of ${fleet.length}`, serving === fleet.length && serving ? "" : serving ? "warning" : "error");
  setTile("Requests/s (10 s)", formatNumber(clusterSum(sumOfLastSecs("requests", 10) / Math.min(10, Math.max(points.length, 1)), "requests_per_sec")));
  setTile("Errors (1 min)", formatNumber(errors), errors ? "error" : "");
  setTile("In flight", formatNumber(clusterSum(snapshot.admission?.inflight ?? now.in_flight, "in_flight")));
  const waiting = clusterSum(snapshot.admission?.waiting, "waiting");
  setTile("Queued", formatNumber(waiting), waiting ? "warning" : "");
  setTile("First token p50", minute.length ? formatMillis(median(minute.map((point) => point.first_p50_ms))) : "–");
  setTile("First token p99", minute.length ? formatMillis(Math.max(...minute.map((point) => point.first_p99_ms))) : "–");
  const gaps = fleet.map((worker) => worker.minute?.between_p50_ms).filter(hasValue);
  setTile("Between tokens", gaps.length ? formatMillis(median(gaps)) : "–");
  const tokens = fleet.map(totalTokens).filter(hasValue), prompts = fleet.map((worker) => worker.minute?.input_tokens_per_sec).filter(hasValue);
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  setTile("Tokens/s out", tokens.length ? formatNumber(sum(tokens)) : "–", "", snapshot.usage_metrics ? prompts.length ? `${formatNumber(sum(prompts))} prompt tokens/s` : "" : "needs [server] usage_metrics");
  const matched = snapshot.policy?.matched_ratio;
  setTile("Policy", snapshot.policy?.name ?? "–", "text", hasValue(matched) ? `${Math.round(100 * matched)} % of all prompt text matched its prefix tree` : "");
}

