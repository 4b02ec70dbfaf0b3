/* The last requests. A row opens the details of its request: where it waited, its attempts, its worker and the reason. */
const OFF = "Nothing is counted: [server] metrics is false.";
const GOOD = new Set(["completed"]), SHRUG = new Set(["client_disconnected", "stream_cancelled"]);
const WHY = {
  round_robin: "it was next in turn, by weight", least_request: "it had the fewest in flight, by weight", random: "it was drawn at random, by weight",
  power_of_two: "of two drawn at random it had fewer in flight", cache_aware: "of those that are not too busy it should have most of the prompt in its cache",
  consistent_hashing: "its place on the hash ring is the one of this session", prefix_hash: "its place on the hash ring is the one of this prompt's beginning",
};
let openEnd = "";
empties("end-rows");
cleaners.push(() => { openEnd = ""; });
const endId = (end) => `${end.at} ${end.request_id} ${end.worker}`;
function endKind(end) {
  if (SHRUG.has(end.end)) return "warn";
  return GOOD.has(end.end) && !(end.status >= 500) ? "ok" : "bad";
}
function paintEnds() {
  show($("end-open"), Boolean(openEnd));
  if ($("hold").checked || openEnd) return;
  drawEnds();
}
function drawEnds() {
  const all = last.recent_ends ?? [], only = $("failures").checked;
  const words = $("find-end").value.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (end) => [end.request_id, end.trace_id, end.model, end.worker, end.prefill, end.route, end.key, end.status, end.end, end.error].join(" ").toLowerCase();
  const shown = all.filter((end) => (!only || endKind(end) === "bad") && words.every((word) => text(end).includes(word))).slice(0, 60);
  fill($("end-rows"), [shown, openEnd], () => shown.flatMap((end) => endId(end) === openEnd ? [endRow(end), lifeRow(end)] : [endRow(end)]));
  say($("no-ends"), shown.length ? "" : last.metrics === false ? OFF : only || words.length ? "None of the last ones." : "No request has ended yet.");
}
function endRow(end) {
  const kind = endKind(end), open = endId(end) === openEnd;
  const by = end.ended_by ? ` by ${end.ended_by}` : "";
  const button = pressed(String(end.end ?? "").replaceAll("_", " "), `fold ${kind}`, () => openLife(open ? "" : endId(end)));
  mark(button, "aria-expanded", open);
  mark(button, "title", "its steps");
  const tries = end.attempts > 1 ? make("span", "badge warn", `${end.attempts} attempts`) : null;
  return make("tr", open ? "open" : "",
    make("td", "quiet", time(end.at, clock)), make("td", "", button, make("span", "small", by)),
    make("td", end.status >= 500 ? "bad" : "", end.status ? String(end.status) : "–"),
    make("td", "num", millis(end.total_ms)),
    make("td", "wide", end.route ?? "", make("span", "quiet", end.model ? ` ${end.model}${end.target_model ? ` as ${end.target_model}` : ""}` : "")),
    make("td", "wide", [end.prefill, end.worker].filter(Boolean).map(short).join(" › ") || make("span", "quiet", "no worker asked"), tries ? " " : null, tries, end.error ? make("span", "bad", ` ${end.error}`) : null));
}
function openLife(id) {
  openEnd = id;
  show($("end-open"), Boolean(openEnd));
  drawEnds();
  const open = $("end-rows").querySelector("[aria-expanded=true]");
  if (open) open.focus();
}
$("end-open").addEventListener("click", () => openLife(""));
for (const id of ["failures", "hold", "find-end"]) $(id).addEventListener("input", () => { if (last) drawEnds(); });

/* The phases of a request in order, in milliseconds from its first byte. */
function phases(end) {
  const points = [["waited in the queue", end.queue_ms, "warn"], ["prepared and connected", end.sent_ms, ""], ["worker, until its head", end.head_ms, "soft"], ["until the first token", end.first_ms, "blue"], ["streamed", end.total_ms, "ok"]];
  const found = [];
  let at = 0;
  for (const [name, until, kind] of points) {
    if (!known(until) || until < at || (until === at && found.length)) continue;
    found.push({ name, kind, from: at, until });
    at = until;
  }
  return found;
}
function whyWorker(end) {
  if (!end.worker) return "No worker was asked.";
  const policy = end.policy ? `${WHY[end.policy] ?? "the policy chose it"} (${end.policy})` : "the policy chose it";
  const failed = (end.tried ?? []).slice(0, -1).map((each) => short(each.worker));
  return [
    `Among the workers that could take it, ${policy}`,
    failed.length && `after ${failed.join(", ")} had failed`,
    end.target_model && `${end.model} is an alias, whose target was ${end.target_model}`,
    end.prefill && `its prompt was computed by ${short(end.prefill)}`,
    end.fallback && `no prefill leg: ${end.fallback}`,
  ].filter(Boolean).join("; ") + ".";
}
function lifeRow(end) {
  const all = Math.max(end.total_ms ?? 0, 0.001);
  const bars = phases(end).map(({ name, kind, from, until }) => {
    const bar = make("i", kind);
    bar.style.left = `${(100 * from) / all}%`;
    bar.style.width = `${Math.max(0.4, (100 * (until - from)) / all)}%`;
    return make("li", "", make("span", "what", name), make("span", "lane", bar), make("span", "num", millis(until - from)));
  });
  const cell = make("td", "", make("p", "", make("b", "", "Why this worker? "), whyWorker(end), " ", pressed("Where would this request go now?", "link", () => explainLike(end))),
    end.has_candidates ? candidates(end) : make("p", "quiet small", "Its candidates were not kept: those of two requests a second are."),
    (end.tried ?? []).length ? make("ol", "tries", ...end.tried.map((each) => make("li", /^[23]/.test(each.outcome) ? "ok" : "bad", make("b", "", short(each.worker)), ` ${each.outcome.replaceAll("_", " ")}`))) : null,
    make("ol", "lanes", ...bars),
    make("div", "columns", facts([
      ["Began", time(Date.parse(end.at) / 1000 - (end.total_ms ?? 0) / 1000)], ["Request id", end.request_id && make("code", "", end.request_id)],
      ["Trace", end.trace_id ? make("code", "", end.trace_id) : ""], ["Ended in", end.phase],
      ["Caller", [end.key, end.client].filter(Boolean).join(" from ")], ["Error", end.error],
    ]), facts([
      ["Rank", end.rank], ["Weights", end.weight_version],
      ["Prefill leg", known(end.prefill_ms) && end.prefill && `${short(end.prefill)}, ${millis(end.prefill_ms)}`], ["Decode leg", end.prefill && short(end.worker)],
      ["Size", `${bytes(end.bytes_in)} in, ${bytes(end.bytes_out ?? 0)} out${end.stream ? `, ${one(end.chunks ?? 0, "chunk")}` : ""}`],
      ["Longest gap", known(end.longest_gap_ms) && end.stream && millis(end.longest_gap_ms)],
    ])),
    make("p", "quiet small", "On the command line: ", make("code", "", `omni-proxy trace ${end.trace_id || end.request_id || "ID"}`)));
  cell.colSpan = 6;
  return make("tr", "life", cell);
}
/* The candidates when the worker was picked, from GET /explain. */
function candidates(end) {
  const it = make("div", "candidates", make("p", "quiet small", "Its candidates …"));
  ask("GET", `explain?request_id=${encodeURIComponent(end.request_id)}`).then((answer) => {
    if (!answer.ok) { it.replaceChildren(make("p", "quiet small", `Its candidates are not known any more: ${answer.why}`)); return; }
    const record = answer.body, left = record.total - record.workers.length;
    it.replaceChildren(
      make("p", "", make("b", "", "Its candidates, when its first worker was picked"), record.reason ? `: ${record.reason} (${record.policy})` : ` (${record.policy})`),
      ...record.workers.map((worker) => verdict(worker, worker.url === record.worker && (!known(worker.rank) || String(worker.rank) === String(end.rank)), "took it", knownOf(worker))),
      ...left > 0 ? [make("p", "quiet small", `and ${left} more`)] : []);
  });
  return it;
}
/* The request's body is not stored: the preview gets a minimal one with its model. */
function explainLike(end) {
  if ([...$("path").options].some((option) => option.value === end.route)) $("path").value = end.route;
  $("body").value = JSON.stringify({ model: end.model ?? "", messages: [{ role: "user", content: "Hello" }], stream: Boolean(end.stream) });
  $("ask").requestSubmit();
  $("explain").scrollIntoView({ block: "center" });
}
