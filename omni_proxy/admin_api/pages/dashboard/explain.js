/* Where a request would go, and which workers are eligible. Nothing is sent to a worker. */
clearOnSignOut("explain-result");
for (const path of ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/generate", "/v1/audio/speech", "/v1/audio/speech/batch"]) {
  $("explain-route").append(createElement("option", "", path));
}
$("explain-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const response = await callApi("POST", "explain?path=" + encodeURIComponent($("explain-route").value), $("explain-body").value, JSON_HEADERS);
  if (needsSignIn(response.status, response.body)) return;
  $("explain-result").replaceChildren(...(response.ok ? explanation(response.body) : [createElement("div", "box error", response.error)]));
});
$("explain-body").addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("explain-form").requestSubmit(); });
function explanation(explained) {
  const needed = explained.need ?? {};
  const requirements = `Requirements: ${[(needed.capabilities ?? []).join(", "), needed.model && `model ${needed.model}`, needed.weights && `weights ${needed.weights}`].filter(Boolean).join(", ") || "none"}.${explained.alias?.target ? ` Target of the alias ${explained.alias.name}: ${explained.alias.target} (${explained.alias.reason}).` : ""} Policy: ${explained.policy}.`;
  const picked = explained.pick?.worker_id;
  const result = explained.pick
    ? createElement("p", "", createElement("b", "ok", `It would go to ${shortUrl(explained.pick.url ?? decodeURIComponent(picked))}`), explained.pick.reason ? `: ${explained.pick.reason}` : "")
    : createElement("p", "", createElement("b", "error", `No eligible worker: ${explained.refusal?.status ?? 503} ${explained.refusal?.code ?? ""}`), explained.refusal ? ` · ${explained.refusal.message}` : "");
  const figures = (worker) => policyFiguresText({ matched_bytes: explained.pick?.matched_bytes?.[worker.url], matched_tokens: explained.pick?.matched_tokens?.[worker.url], ...explained.pick?.cost?.[worker.url] });
  return [result, createElement("p", "muted small", requirements), ...(explained.workers ?? []).map((worker) => createCandidateRow(worker, worker.worker_id === picked, figures(worker)))];
}
function createCandidateRow(worker, isPicked, figures) {
  const rank = hasValue(worker.rank) ? `, rank ${worker.rank}` : "";
  return createElement("div", "candidate" + (isPicked ? " picked" : ""), createElement("b", "", shortUrl(worker.url) + rank),
    createElement("span", "", worker.eligible ? createElement("span", "ok", isPicked ? "picked" : "eligible") : createElement("span", "error", worker.reasons.join("; ")),
      createElement("span", "muted", ` · ${formatNumber(worker.in_flight)} in flight${figures}`)));
}
/* The policy's figures of a worker for this request. */
const POLICY_FIGURES = [["matched_bytes", "prompt bytes cached"], ["matched_tokens", "prompt tokens cached"], ["uncached_tokens", "prompt tokens to compute"], ["backlog_tokens", "tokens of backlog"], ["in_flight_tokens", "tokens of requests in flight"]];
function policyFiguresText(figures) {
  return POLICY_FIGURES.filter(([name]) => hasValue(figures[name])).map(([name, label]) => ` · ${formatNumber(figures[name])} ${label}`).join("");
}
