/* A chat through the proxy, sent like a client's. The caller's key is kept only in this page's memory. */
let turns = [], chatting = null, chatKey = "";
empties("chat-turns", "chat-says", "chat-elsewhere");
/* This page is on the [admin] listen address; a browser does not let it call another one. */
function chatElsewhere() {
  const url = last.models_at.replace(/^(https?:\/\/)(?:0\.0\.0\.0|\[::\])(?=:\d+$)/, `$1${location.hostname}`);
  if (!url) return [make("p", "", "This address has control routes only; model routes are at a Unix socket, ", make("code", "", "[server] host"), ".")];
  const model = (last.fleet ?? []).map((worker) => worker.model).find(Boolean);
  const body = JSON.stringify({ ...model ? { model } : {}, messages: [{ role: "user", content: "Hello" }] });
  const header = last.key_required ? " -H 'authorization: Bearer KEY'" : "";
  return [make("p", "", "This address has control routes only. Model routes are at ", make("code", "", url), ":"),
    copied(`curl ${url}/v1/chat/completions -H 'content-type: application/json'${header} -d '${body.replaceAll("'", "'\\''")}'`)];
}
cleaners.push(() => { chatting?.abort(); turns = []; chatKey = ""; $("chat-key").value = ""; });
$("chat-key").addEventListener("input", () => { chatKey = $("chat-key").value.trim(); });
function paintPlayground(fleet) {
  const away = known(last.models_at);
  show($("chat"), !away);
  show($("chat-clear"), !away);
  show($("chat-elsewhere"), away);
  if (away) fill($("chat-elsewhere"), last.models_at, chatElsewhere);
  const models = [...new Set(fleet.flatMap((worker) => [worker.model, ...worker.adapters ?? []]).filter(Boolean))].sort();
  fill($("chat-models"), models, () => models.map((model) => new Option(model)));
  if (!$("chat-model").value && !$("chat-model").touched && models.length) $("chat-model").value = models[0];
}
$("chat-model").addEventListener("input", () => { $("chat-model").touched = true; });
$("chat-clear").addEventListener("click", () => { chatting?.abort(); turns = []; $("chat-turns").replaceChildren(); $("chat-says").replaceChildren(); $("chat-text").focus(); });
$("chat-stop").addEventListener("click", () => chatting?.abort());
$("chat-text").addEventListener("keydown", (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("chat").requestSubmit(); } });
$("chat").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = $("chat-text").value.trim();
  if (!text || chatting) return;
  $("chat-text").value = "";
  turns.push({ role: "user", content: text });
  $("chat-turns").append(make("li", "user", text));
  const answer = make("li", "assistant");
  $("chat-turns").append(answer);
  chatting = new AbortController();
  show($("chat-stop"), true);
  mark($("chat-turns"), "aria-busy", true);
  const result = { begun: performance.now(), text: "", chunks: 0 };
  try {
    await chat(answer, result, chatting.signal);
    turns.push({ role: "assistant", content: result.text });
  } catch (error) {
    turns.pop();
    result.failed = chatting.signal.aborted ? "stopped" : error.message;
    answer.append(make("p", chatting.signal.aborted ? "quiet" : "bad", result.failed));
  }
  chatting = null;
  show($("chat-stop"), false);
  mark($("chat-turns"), "aria-busy", false);
  chatFacts(result);
});
/* Throws an error with the proxy's message. */
async function chat(answer, result, signal) {
  const body = { model: $("chat-model").value.trim() || undefined, messages: turns, stream: true, stream_options: { include_usage: true }, max_tokens: Number($("chat-most").value) || undefined };
  const headers = { "Content-Type": "application/json", ...chatKey ? { Authorization: "Bearer " + inBytes(chatKey) } : {} };
  const reply = await fetch("v1/chat/completions", { method: "POST", body: JSON.stringify(body), headers, signal, cache: "no-store", credentials: "omit" });
  result.status = reply.status;
  result.worker = decodeURIComponent(reply.headers.get("X-SGLang-Omni-Worker") ?? "");
  result.id = reply.headers.get("X-SGLang-Omni-Request-ID");
  result.attempt = Number(reply.headers.get("X-SGLang-Omni-Route-Attempt") ?? 1);
  if (!reply.ok) {
    const body = await reply.json().catch(() => ({}));
    throw new Error(`${reply.status}: ${body.error?.message ?? body.message ?? "refused"}${reply.status === 401 ? " Give a caller's key above." : ""}`);
  }
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const events = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
    rest = events.pop();
    for (const event of events) takeChunk(event, answer, result);
  }
  if (!result.finished) throw new Error("the stream broke off");
}
function takeChunk(event, answer, result) {
  const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
  if (!data) return;
  if (data === "[DONE]") { result.finished = true; return; }
  const chunk = JSON.parse(data);
  if (chunk.error) throw new Error(chunk.error.message ?? "the stream failed");
  if (chunk.usage) result.tokens = chunk.usage.completion_tokens;
  const piece = chunk.choices?.[0]?.delta?.content ?? chunk.choices?.[0]?.delta?.reasoning_content ?? "";
  if (chunk.choices?.[0]?.finish_reason) result.finished = true;
  if (!piece) return;
  result.first ??= performance.now();
  result.last = performance.now();
  result.chunks += 1;
  result.text += piece;
  answer.textContent = result.text;
  chatFacts(result);
}
function chatFacts(result) {
  const tokens = result.tokens ?? result.chunks, secs = ((result.last ?? 0) - (result.first ?? 0)) / 1000;
  $("chat-says").replaceChildren(facts([
    ["Worker", result.worker ? `${short(result.worker)}${result.attempt > 1 ? `, attempt ${result.attempt}` : ""}` : "none"], ["Status", result.status ? String(result.status) : ""],
    ["First token", known(result.first) && millis(result.first - result.begun)], ["Tokens/s", tokens > 1 && secs > 0 && count((tokens - 1) / secs)],
    ["Tokens", tokens && `${count(tokens)}${known(result.tokens) ? "" : " chunks"}`], ["In all", millis(performance.now() - result.begun)],
    ["Request id", result.id && make("code", "", result.id)],
  ]));
}
