/* Where a request would go, with the verdict on each worker. Nothing is sent to a worker. */
empties("answer");
for (const path of ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/generate", "/v1/audio/speech", "/v1/audio/speech/batch"]) {
  $("path").append(make("option", "", path));
}
$("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const answer = await ask("POST", "explain?path=" + encodeURIComponent($("path").value), $("body").value, { "Content-Type": "application/json" });
  if (locks(answer.status, answer.body)) return;
  $("answer").replaceChildren(...(answer.ok ? verdicts(answer.body) : [make("div", "box bad", answer.why)]));
});
$("body").addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit(); });
function verdicts(explanation) {
  const need = explanation.need ?? {};
  const wants = `It needs ${(need.capabilities ?? []).join(", ") || "nothing special"}${need.model ? `, the model ${need.model}` : ""}${need.weights ? `, weights ${need.weights}` : ""}.${explanation.alias?.target ? ` ${explanation.alias.name} is an alias: its target is ${explanation.alias.target}, since ${explanation.alias.reason}.` : ""} The policy is ${explanation.policy}.`;
  const picked = explanation.pick?.worker_id;
  const head = explanation.pick
    ? make("p", "", make("b", "ok", `It would go to ${short(explanation.pick.url ?? decodeURIComponent(picked))}`), explanation.pick.reason ? `: ${explanation.pick.reason}` : "")
    : make("p", "", make("b", "bad", `Nobody can take it: ${explanation.refusal?.status ?? 503} ${explanation.refusal?.code ?? ""}`), explanation.refusal ? ` · ${explanation.refusal.message}` : "");
  const facts = (worker) => knownOf({ matched_bytes: explanation.pick?.matched_bytes?.[worker.url], matched_tokens: explanation.pick?.matched_tokens?.[worker.url], ...explanation.pick?.cost?.[worker.url] });
  return [head, make("p", "quiet small", wants), ...(explanation.workers ?? []).map((worker) => verdict(worker, worker.worker_id === picked, "picked", facts(worker)))];
}
function verdict(worker, isPick, words, facts) {
  const rank = known(worker.rank) ? `, rank ${worker.rank}` : "";
  return make("div", "verdict" + (isPick ? " pick" : ""), make("b", "", short(worker.url) + rank),
    make("span", "", worker.eligible ? make("span", "ok", isPick ? words : "could take it") : make("span", "bad", worker.reasons.join("; ")),
      make("span", "quiet", ` · ${count(worker.in_flight)} in flight${facts}`)));
}
/* The policy's figures of a worker for this request. */
const FACTS = [["matched_bytes", "bytes of its prompt cached"], ["matched_tokens", "tokens of its prompt cached"], ["uncached_tokens", "prompt tokens to compute"], ["backlog_tokens", "tokens before it"], ["in_flight_tokens", "for what is in flight"]];
function knownOf(facts) {
  return FACTS.filter(([name]) => known(facts[name])).map(([name, words]) => ` · ${count(facts[name])} ${words}`).join("");
}
