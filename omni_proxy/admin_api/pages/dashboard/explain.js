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
function verdicts(told) {
  const need = told.need ?? {};
  const wants = `It needs ${(need.capabilities ?? []).join(", ") || "nothing special"}${need.model ? `, the model ${need.model}` : ""}${need.weights ? `, weights ${need.weights}` : ""}.${told.alias?.target ? ` ${told.alias.name} is an alias: its target is ${told.alias.target}, since ${told.alias.reason}.` : ""} The policy is ${told.policy}.`;
  const picked = told.pick?.worker_id;
  const head = told.pick
    ? make("p", "", make("b", "ok", `It would go to ${short(told.pick.url ?? decodeURIComponent(picked))}`), told.pick.reason ? `: ${told.pick.reason}` : "")
    : make("p", "", make("b", "bad", `Nobody can take it: ${told.refusal?.status ?? 503} ${told.refusal?.code ?? ""}`), told.refusal ? ` · ${told.refusal.message}` : "");
  const facts = (worker) => knownOf({ matched_bytes: told.pick?.matched_bytes?.[worker.url], matched_tokens: told.pick?.matched_tokens?.[worker.url], ...told.pick?.cost?.[worker.url] });
  return [head, make("p", "quiet small", wants), ...(told.workers ?? []).map((worker) => verdict(worker, worker.worker_id === picked, "picked", facts(worker)))];
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
