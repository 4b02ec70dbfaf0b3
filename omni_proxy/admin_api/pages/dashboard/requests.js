/* Recent requests. A row expands to the details of its request: its phases, its attempts, its worker and why it was picked. */
const METRICS_OFF = "Metrics are off: [server] metrics is false.";
const SUCCESSFUL_ENDS = new Set(["completed"]), CLIENT_ENDS = new Set(["client_disconnected", "stream_cancelled"]);
const POLICY_REASONS = {
  round_robin: "the next worker in weighted order", least_request: "the worker with the fewest requests in flight by weight", random: "a random worker by weight",
  power_of_two: "the one of two random workers with fewer requests in flight", cache_aware: "the worker that should have most of the prompt in its cache, among those below its load bound",
  consistent_hashing: "the worker to which the hash ring maps the affinity key", prefix_hash: "the worker to which the hash ring maps the beginning of the prompt",
};
let openRequestKey = "";
clearOnSignOut("request-rows");
clearFunctions.push(() => { openRequestKey = ""; });
const requestKey = (request) => `${request.at} ${request.request_id} ${request.worker}`;
function requestKind(request) {
  if (CLIENT_ENDS.has(request.end)) return "warning";
  return SUCCESSFUL_ENDS.has(request.end) && !(request.status >= 500) ? "ok" : "error";
}
function renderRequests() {
  setVisible($("close-request"), Boolean(openRequestKey));
  if ($("pause-requests").checked || openRequestKey) return;
  renderRequestRows();
}
function renderRequestRows() {
  const all = snapshot.recent_ends ?? [], failuresOnly = $("failures-only").checked;
  const terms = $("request-search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (request) => [request.request_id, request.trace_id, request.model, request.worker, request.prefill, request.route, request.key, request.status, request.end, request.error].join(" ").toLowerCase();
  const shown = all.filter((request) => (!failuresOnly || requestKind(request) === "error") && terms.every((term) => text(request).includes(term))).slice(0, 60);
  replaceIfChanged($("request-rows"), [shown, openRequestKey], () => shown.flatMap((request) => requestKey(request) === openRequestKey ? [createRequestRow(request), createRequestDetails(request)] : [createRequestRow(request)]));
  setText($("no-requests"), shown.length ? "" : snapshot.metrics === false ? METRICS_OFF : failuresOnly || terms.length ? "No matching requests." : "No requests yet.");
}
function createRequestRow(request) {
  const kind = requestKind(request), open = requestKey(request) === openRequestKey;
  const by = request.ended_by ? ` by ${request.ended_by}` : "";
  const button = createButton(String(request.end ?? "").replaceAll("_", " "), `disclosure ${kind}`, () => openRequest(open ? "" : requestKey(request)));
  setAttribute(button, "aria-expanded", open);
  setAttribute(button, "title", "details");
  const attempts = request.attempts > 1 ? createElement("span", "badge warning", `${request.attempts} attempts`) : null;
  return createElement("tr", open ? "open" : "",
    createElement("td", "muted", createTime(request.at, formatTime)), createElement("td", "", button, createElement("span", "small", by)),
    createElement("td", request.status >= 500 ? "error" : "", request.status ? String(request.status) : "–"),
    createElement("td", "num", formatMillis(request.total_ms)),
    createElement("td", "wide", request.route ?? "", createElement("span", "muted", request.model ? ` ${request.model}${request.target_model ? ` as ${request.target_model}` : ""}` : "")),
    createElement("td", "wide", [request.prefill, request.worker].filter(Boolean).map(shortUrl).join(" › ") || createElement("span", "muted", "no worker"), attempts ? " " : null, attempts, request.error ? createElement("span", "error", ` ${request.error}`) : null));
}
function openRequest(id) {
  openRequestKey = id;
  setVisible($("close-request"), Boolean(openRequestKey));
  renderRequestRows();
  const open = $("request-rows").querySelector("[aria-expanded=true]");
  if (open) open.focus();
}
$("close-request").addEventListener("click", () => openRequest(""));
for (const id of ["failures-only", "pause-requests", "request-search"]) $(id).addEventListener("input", () => { if (snapshot) renderRequestRows(); });

/* The phases of a request in order, in milliseconds from its first byte. */
function phases(request) {
  const points = [["queued", request.queue_ms, "warning"], ["connecting and sending", request.sent_ms, ""], ["waiting for the response head", request.head_ms, "secondary"], ["waiting for the first token", request.first_ms, "info"], ["streaming", request.total_ms, "ok"]];
  const found = [];
  let at = 0;
  for (const [name, end, kind] of points) {
    if (!hasValue(end) || end < at || (end === at && found.length)) continue;
    found.push({ name, kind, from: at, end });
    at = end;
  }
  return found;
}
function pickReason(request) {
  if (!request.worker) return "It was not sent to a worker.";
  const policy = request.policy ? `Policy ${request.policy} picked ${POLICY_REASONS[request.policy] ?? "it"}` : "The policy picked it";
  const failed = (request.tried ?? []).slice(0, -1).map((each) => shortUrl(each.worker));
  return [
    policy,
    failed.length && `${failed.join(", ")} had failed`,
    request.target_model && `target of the alias ${request.model}: ${request.target_model}`,
    request.prefill && `prefill worker: ${shortUrl(request.prefill)}`,
    request.fallback && `no prefill leg: ${request.fallback}`,
  ].filter(Boolean).join("; ") + ".";
}
function createRequestDetails(request) {
  const totalMs = Math.max(request.total_ms ?? 0, 0.001);
  const bars = phases(request).map(({ name, kind, from, end }) => {
    const bar = createElement("i", kind);
    bar.style.left = `${(100 * from) / totalMs}%`;
    bar.style.width = `${Math.max(0.4, (100 * (end - from)) / totalMs)}%`;
    return createElement("li", "", createElement("span", "", name), createElement("span", "waterfall-bar", bar), createElement("span", "num", formatMillis(end - from)));
  });
  const cell = createElement("td", "", createElement("p", "", createElement("b", "", "Why this worker? "), pickReason(request), " ", createButton("Where would this request go now?", "link-button", () => explainAgain(request))),
    request.has_candidates ? createCandidates(request) : createElement("p", "muted small", "Its candidates were not recorded; those of two requests per second are."),
    (request.tried ?? []).length ? createElement("ol", "attempts", ...request.tried.map((each) => createElement("li", /^[23]/.test(each.outcome) ? "ok" : "error", createElement("b", "", shortUrl(each.worker)), ` ${each.outcome.replaceAll("_", " ")}`))) : null,
    createElement("ol", "waterfall", ...bars),
    createElement("div", "columns", descriptionList([
      ["Started", createTime(Date.parse(request.at) / 1000 - (request.total_ms ?? 0) / 1000)], ["Request ID", request.request_id && createElement("code", "", request.request_id)],
      ["Trace ID", request.trace_id ? createElement("code", "", request.trace_id) : ""], ["Phase at the end", request.phase],
      ["Caller", [request.key, request.client].filter(Boolean).join(" from ")], ["Error", request.error],
    ]), descriptionList([
      ["Rank", request.rank], ["Weights", request.weight_version],
      ["Prefill leg", hasValue(request.prefill_ms) && request.prefill && `${shortUrl(request.prefill)}, ${formatMillis(request.prefill_ms)}`], ["Decode leg", request.prefill && shortUrl(request.worker)],
      ["Size", `${formatBytes(request.bytes_in)} in, ${formatBytes(request.bytes_out ?? 0)} out${request.stream ? `, ${pluralize(request.chunks ?? 0, "chunk")}` : ""}`],
      ["Longest gap", hasValue(request.longest_gap_ms) && request.stream && formatMillis(request.longest_gap_ms)],
    ])),
    createElement("p", "muted small", "On the command line: ", createElement("code", "", `omni-proxy trace ${request.trace_id || request.request_id || "ID"}`)));
  cell.colSpan = 6;
  return createElement("tr", "request-details", cell);
}
/* The candidates of the first attempt, from GET /explain. */
function createCandidates(request) {
  const element = createElement("div", "candidates", createElement("p", "muted small", "Candidates …"));
  callApi("GET", `explain?request_id=${encodeURIComponent(request.request_id)}`).then((response) => {
    if (!response.ok) { element.replaceChildren(createElement("p", "muted small", `Candidates are no longer available: ${response.error}`)); return; }
    const explained = response.body, left = explained.total - explained.workers.length;
    element.replaceChildren(
      createElement("p", "", createElement("b", "", "Candidates of the first attempt"), explained.reason ? `: ${explained.reason} (${explained.policy})` : ` (${explained.policy})`),
      ...explained.workers.map((worker) => createCandidateRow(worker, worker.url === explained.worker && (!hasValue(worker.rank) || String(worker.rank) === String(request.rank)), policyFiguresText(worker))),
      ...left > 0 ? [createElement("p", "muted small", `and ${left} more`)] : []);
  });
  return element;
}
/* The request's body is not stored: the preview gets a minimal one with its model. */
function explainAgain(request) {
  if ([...$("explain-route").options].some((option) => option.value === request.route)) $("explain-route").value = request.route;
  $("explain-body").value = JSON.stringify({ model: request.model ?? "", messages: [{ role: "user", content: "Hello" }], stream: Boolean(request.stream) });
  $("explain-form").requestSubmit();
  $("explain").scrollIntoView({ block: "center" });
}
