/* Callers of model routes by the names of their keys: limits and usage; and adding one. The proxy receives only the hash of the key. */
empties("caller-rows", "new-key");
function usage(used, limit) {
  if (!limit) return count(used);
  const bar = make("div", "bar", make("i", used >= limit ? "body full" : "body"));
  bar.firstChild.style.width = `${Math.min(100, (100 * used) / limit)}%`;
  return make("div", "", `${count(used)} of ${count(limit)}`, bar);
}
function paintCallers() {
  const callers = last.keys ?? [];
  const refused = last.refused_without_key ?? 0;
  show($("caller-table"), callers.length > 0 || refused > 0);
  show($("no-callers"), !callers.length);
  say($("no-callers"), last.key_required ? "All callers share the key of [server] api_key; no [[keys]]." : "No [[keys]]: whoever reaches the port may send requests.");
  fill($("caller-rows"), [callers, refused], () => [...callers.map((caller) => callerRow(
    make("td", "", make("b", "", caller.name), caller.origin === "api" ? removing(caller.name) : "", make("div", "quiet small", caller.models?.length ? `models ${caller.models.join(", ")}` : "")),
    make("td", "", usage(caller.in_flight, caller.max_inflight)),
    make("td", "", count(caller.requests), make("div", "quiet small", caller.requests_per_minute ? `at most ${count(caller.requests_per_minute)} a minute` : "")),
    make("td", "", `${count(caller.input_tokens)}, ${count(caller.output_tokens)}`, make("div", "quiet small", caller.tokens_per_minute ? `at most ${count(caller.tokens_per_minute)} a minute` : "")),
    make("td", "", Object.entries(caller.refused).filter((each) => each[1]).map(([reason, number]) => `${reason.replaceAll("_", " ")} ${count(number)}`).join(", ") || "none"))), ...refused ? [callerRow(make("td", "quiet", "without a right key"), ...["", "", ""].map(() => make("td", "quiet", "–")), make("td", "", count(refused)))] : []]);
}
const CALLER_COLUMNS = ["", "In flight", "Requests", "Tokens in, out", "Refused"];
function callerRow(...cells) {
  cells.forEach((cell, at) => { if (at) cell.dataset.name = CALLER_COLUMNS[at]; });
  return make("tr", "", ...cells);
}
function removing(name) {
  const button = pressed("Remove", "plain small", () => removeCaller(name));
  mark(button, "aria-label", `Remove ${name}`);
  permit(button, "all");
  return button;
}
async function removeCaller(name) {
  const left = (last.keys ?? []).length === 1 ? " It is the last key: model routes are then open to everyone, unless [server] api_key is set." : "";
  if (!await sure(`Remove ${name}?`, `Its key is refused from then on; its requests in flight will finish.${left}`, "Remove it")) return;
  await change(`Removing ${name}`, `${name} was removed`, "DELETE", `keys/${encodeURIComponent(name)}`);
}
/* After a key is shown the next step is to copy it, not to make another one. */
function showKey(...parts) {
  $("new-key").replaceChildren(...parts);
  say($("keying-make"), parts.length ? "Add another" : "Add it");
  dress($("keying-make"), parts.length ? "" : "main");
  dress($("keying-no"), parts.length ? "main" : "");
}
$("make-key").addEventListener("click", () => {
  showKey();
  show($("keying-first"), !last.key_required);
  $("key-known").replaceChildren(...[...new Set((last.fleet ?? []).flatMap((worker) => [worker.model, ...worker.adapters ?? []]).filter(Boolean))].map((model) => new Option(model)));
  $("keying").showModal();
  $("key-name").focus();
});
$("keying-no").addEventListener("click", () => { showKey(); $("keying").close(); });
$("keying").addEventListener("close", () => showKey());
const KEY_BYTES = 32;
$("keying-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const name = $("key-name").value.trim();
  const limits = [["max_inflight", "key-inflight"], ["requests_per_minute", "key-requests"], ["tokens_per_minute", "key-tokens"], ["priority", "key-priority"]];
  const models = [...new Set($("key-models").value.split(",").map((each) => each.trim()).filter(Boolean))];
  const lines = (hash) => ["[[keys]]", `name = "${name}"`, `key_sha256 = "${hash}"`, ...models.length ? [`models = [${models.map((each) => JSON.stringify(each)).join(", ")}]`] : [], ...limits.filter(([, id]) => $(id).value).map(([key, id]) => `${key} = ${Number($(id).value)}`)].join("\n") + "\n";
  if (!crypto.subtle) {
    showKey(make("p", "warn", "A browser makes hashes only on https or on localhost. Make the key with omni-proxy keys new, and put its hash here:"), make("pre", "box", lines("THE HASH")));
    return;
  }
  const random = btoa(String.fromCharCode(...crypto.getRandomValues(new Uint8Array(KEY_BYTES)))).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");
  const made = `omni-${random}`, digest = new Uint8Array(await crypto.subtle.digest("SHA-256", new TextEncoder().encode(made)));
  const hash = [...digest].map((each) => each.toString(16).padStart(2, "0")).join("");
  const numbers = limits.filter(([, id]) => $(id).value).map(([key, id]) => [key, Number($(id).value)]);
  const answer = await ask("POST", "keys", JSON.stringify({ name, key_sha256: hash, models, ...Object.fromEntries(numbers) }), JSON_BODY);
  if (!answer.ok && answer.status !== 403) {
    showKey(make("p", "bad", `Not added: ${answer.why}`));
    say($("keying-make"), "Add it");
    return;
  }
  const file = last?.config_file ?? "the configuration file";
  const entry = make("details", "", make("summary", "small", `Its entry, to keep it in ${file} instead`), copied(lines(hash)));
  entry.open = !answer.ok;
  showKey(
    make("p", "", `The key, for ${name}. It is shown once, and sent nowhere:`), copied(made),
    make("p", answer.ok ? "ok" : "warn", answer.ok ? "In force now: its row shows what it uses." : `Your key may not add callers (${answer.why}). Who may change the file adds this entry:`), entry);
});
function copied(text) {
  const button = pressed("Copy", "", async () => {
    const done = await navigator.clipboard?.writeText(text).then(() => true, () => false);
    say(button, done ? "Copied" : "Select it, and copy");
  });
  return make("div", "copied", make("pre", "box", text), button);
}
