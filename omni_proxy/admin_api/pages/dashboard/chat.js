/* A chat through the proxy, sent as a client request. The API key is kept only in the memory of the page. */
let messages = [], chatAbort = null, chatKey = "";
clearOnSignOut("chat-messages", "chat-stats", "chat-unavailable");
/* Shown on the [admin] listen address: browsers do not allow the page to call another one. */
function chatUnavailable() {
  const url = snapshot.models_at.replace(/^(https?:\/\/)(?:0\.0\.0\.0|\[::\])(?=:\d+$)/, `$1${location.hostname}`);
  if (!url) return [createElement("p", "", "This address has control routes only; model routes are at a Unix socket, ", createElement("code", "", "[server] host"), ".")];
  const model = (snapshot.fleet ?? []).map((worker) => worker.model).find(Boolean);
  const body = JSON.stringify({ ...model ? { model } : {}, messages: [{ role: "user", content: "Hello" }] });
  const header = snapshot.key_required ? " -H 'authorization: Bearer KEY'" : "";
  return [createElement("p", "", "This address has control routes only. Model routes are at ", createElement("code", "", url), ":"),
    createCopyBox(`curl ${url}/v1/chat/completions -H 'content-type: application/json'${header} -d '${body.replaceAll("'", "'\\''")}'`)];
}
clearFunctions.push(() => { chatAbort?.abort(); messages = []; chatKey = ""; $("chat-key").value = ""; });
$("chat-key").addEventListener("input", () => { chatKey = $("chat-key").value.trim(); });
function renderChat(fleet) {
  const isUnavailable = hasValue(snapshot.models_at);
  setVisible($("chat-form"), !isUnavailable);
  setVisible($("chat-clear"), !isUnavailable);
  setVisible($("chat-unavailable"), isUnavailable);
  if (isUnavailable) replaceIfChanged($("chat-unavailable"), snapshot.models_at, chatUnavailable);
  const models = [...new Set(fleet.flatMap((worker) => [worker.model, ...worker.adapters ?? []]).filter(Boolean))].sort();
  replaceIfChanged($("chat-models"), models, () => models.map((model) => new Option(model)));
  if (!$("chat-model").value && !$("chat-model").touched && models.length) $("chat-model").value = models[0];
}
$("chat-model").addEventListener("input", () => { $("chat-model").touched = true; });
$("chat-clear").addEventListener("click", () => { chatAbort?.abort(); messages = []; $("chat-messages").replaceChildren(); $("chat-stats").replaceChildren(); $("chat-input").focus(); });
$("chat-stop").addEventListener("click", () => chatAbort?.abort());
$("chat-input").addEventListener("keydown", (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("chat-form").requestSubmit(); } });
$("chat-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = $("chat-input").value.trim();
  if (!text || chatAbort) return;
  $("chat-input").value = "";
  messages.push({ role: "user", content: text });
  $("chat-messages").append(createElement("li", "user", text));
  const item = createElement("li", "assistant");
  $("chat-messages").append(item);
  chatAbort = new AbortController();
  setVisible($("chat-stop"), true);
  setAttribute($("chat-messages"), "aria-busy", true);
  const reply = { startedAt: performance.now(), text: "", chunks: 0 };
  try {
    await sendChat(item, reply, chatAbort.signal);
    messages.push({ role: "assistant", content: reply.text });
  } catch (error) {
    messages.pop();
    const failure = chatAbort.signal.aborted ? "stopped" : error.message;
    item.append(createElement("p", chatAbort.signal.aborted ? "muted" : "error", failure));
  }
  chatAbort = null;
  setVisible($("chat-stop"), false);
  setAttribute($("chat-messages"), "aria-busy", false);
  renderChatStats(reply);
});
/* Throws an error with the message of the proxy. */
async function sendChat(item, reply, signal) {
  const body = { model: $("chat-model").value.trim() || undefined, messages, stream: true, stream_options: { include_usage: true }, max_tokens: Number($("chat-max-tokens").value) || undefined };
  const headers = { "Content-Type": "application/json", ...chatKey ? { Authorization: "Bearer " + utf8Bytes(chatKey) } : {} };
  const response = await fetch("v1/chat/completions", { method: "POST", body: JSON.stringify(body), headers, signal, cache: "no-store", credentials: "omit" });
  reply.status = response.status;
  reply.worker = decodeURIComponent(response.headers.get("X-SGLang-Omni-Worker") ?? "");
  reply.id = response.headers.get("X-SGLang-Omni-Request-ID");
  reply.attempt = Number(response.headers.get("X-SGLang-Omni-Route-Attempt") ?? 1);
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    throw new Error(`${response.status}: ${body.error?.message ?? body.message ?? "refused"}${response.status === 401 ? " Enter an API key above." : ""}`);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const events = (buffer + value).replaceAll("\r\n", "\n").split("\n\n");
    buffer = events.pop();
    for (const event of events) applyChatEvent(event, item, reply);
  }
  if (!reply.finished) throw new Error("the stream ended early");
}
function applyChatEvent(event, item, reply) {
  const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
  if (!data) return;
  if (data === "[DONE]") { reply.finished = true; return; }
  const chunk = JSON.parse(data);
  if (chunk.error) throw new Error(chunk.error.message ?? "the stream failed");
  if (chunk.usage) reply.tokens = chunk.usage.completion_tokens;
  const token = chunk.choices?.[0]?.delta?.content ?? chunk.choices?.[0]?.delta?.reasoning_content ?? "";
  if (chunk.choices?.[0]?.finish_reason) reply.finished = true;
  if (!token) return;
  reply.firstTokenAt ??= performance.now();
  reply.lastTokenAt = performance.now();
  reply.chunks += 1;
  reply.text += token;
  item.textContent = reply.text;
  renderChatStats(reply);
}
function renderChatStats(reply) {
  const tokens = reply.tokens ?? reply.chunks, secs = ((reply.lastTokenAt ?? 0) - (reply.firstTokenAt ?? 0)) / 1000;
  $("chat-stats").replaceChildren(inlineList([
    ["Worker", reply.worker ? `${shortUrl(reply.worker)}${reply.attempt > 1 ? `, attempt ${reply.attempt}` : ""}` : "none"], ["Status", reply.status ? String(reply.status) : ""],
    ["First token", hasValue(reply.firstTokenAt) && formatMillis(reply.firstTokenAt - reply.startedAt)], ["Tokens/s", tokens > 1 && secs > 0 && formatNumber((tokens - 1) / secs)],
    ["Tokens", tokens && `${formatNumber(tokens)}${hasValue(reply.tokens) ? "" : " chunks"}`], ["Total", formatMillis(performance.now() - reply.startedAt)],
    ["Request ID", reply.id && createElement("code", "", reply.id)],
  ]));
}
