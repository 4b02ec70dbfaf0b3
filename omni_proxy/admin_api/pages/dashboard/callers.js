/* Callers of model routes, with their limits and usage, and adding one. The proxy receives only the hash of the key. */
clearOnSignOut("caller-rows", "new-key");
function createUsageBar(used, limit) {
  if (!limit) return formatNumber(used);
  const bar = createElement("div", "bar", createElement("i", used >= limit ? "fill exceeded" : "fill"));
  bar.firstChild.style.width = `${Math.min(100, (100 * used) / limit)}%`;
  return createElement("div", "", `${formatNumber(used)} of ${formatNumber(limit)}`, bar);
}
function renderCallers() {
  const callers = snapshot.keys ?? [];
  const refused = snapshot.refused_without_key ?? 0;
  setVisible($("caller-table"), callers.length > 0 || refused > 0);
  setVisible($("no-callers"), !callers.length);
  setText($("no-callers"), snapshot.key_required ? "All clients share [server] api_key; there are no [[keys]]." : "No [[keys]]: any client that can reach this port may send requests.");
  replaceIfChanged($("caller-rows"), [callers, refused], () => [...callers.map((caller) => createCallerRow(
    createElement("td", "", createElement("b", "", caller.name), caller.origin === "api" ? createRemoveButton(caller.name) : "", createElement("div", "muted small", caller.models?.length ? `models ${caller.models.join(", ")}` : "")),
    createElement("td", "", createUsageBar(caller.in_flight, caller.max_inflight)),
    createElement("td", "", formatNumber(caller.requests), createElement("div", "muted small", caller.requests_per_minute ? `limit ${formatNumber(caller.requests_per_minute)} per minute` : "")),
    createElement("td", "", `${formatNumber(caller.input_tokens)}, ${formatNumber(caller.output_tokens)}`, createElement("div", "muted small", caller.tokens_per_minute ? `limit ${formatNumber(caller.tokens_per_minute)} per minute` : "")),
    createElement("td", "", Object.entries(caller.refused).filter((each) => each[1]).map(([reason, number]) => `${reason.replaceAll("_", " ")} ${formatNumber(number)}`).join(", ") || "none"))), ...refused ? [createCallerRow(createElement("td", "muted", "without a valid key"), ...["", "", ""].map(() => createElement("td", "muted", "–")), createElement("td", "", formatNumber(refused)))] : []]);
}
const CALLER_COLUMNS = ["", "In flight", "Requests", "Tokens in, out", "Refused"];
function createCallerRow(...cells) {
  cells.forEach((cell, at) => { if (at) cell.dataset.name = CALLER_COLUMNS[at]; });
  return createElement("tr", "", ...cells);
}
function createRemoveButton(name) {
  const button = createButton("Remove", "small", () => removeCaller(name));
  setAttribute(button, "aria-label", `Remove ${name}`);
  setPermission(button, "all");
  return button;
}
async function removeCaller(name) {
  const lastKeyText = (snapshot.keys ?? []).length === 1 ? " It is the last key: model routes are then open to everyone, unless [server] api_key is set." : "";
  if (!await confirmAction(`Remove ${name}?`, `Its key is refused from then on; its requests in flight will finish.${lastKeyText}`, "Remove")) return;
  await runAction(`Removing ${name}`, `${name} was removed`, "DELETE", `keys/${encodeURIComponent(name)}`);
}
/* After a key is shown the next step is to copy it, not to add another one. */
function showNewKey(...children) {
  $("new-key").replaceChildren(...children);
  setText($("caller-submit"), children.length ? "Add another" : "Add");
  setClass($("caller-submit"), children.length ? "" : "primary");
  setClass($("caller-cancel"), children.length ? "primary" : "");
}
$("add-caller").addEventListener("click", () => {
  showNewKey();
  setVisible($("first-key-warning"), !snapshot.key_required);
  $("known-models").replaceChildren(...[...new Set((snapshot.fleet ?? []).flatMap((worker) => [worker.model, ...worker.adapters ?? []]).filter(Boolean))].map((model) => new Option(model)));
  $("caller-dialog").showModal();
  $("caller-name").focus();
});
$("caller-cancel").addEventListener("click", () => { showNewKey(); $("caller-dialog").close(); });
$("caller-dialog").addEventListener("close", () => showNewKey());
const KEY_BYTES = 32;
$("caller-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const name = $("caller-name").value.trim();
  const limits = [["max_inflight", "caller-inflight"], ["requests_per_minute", "caller-requests"], ["tokens_per_minute", "caller-tokens"], ["priority", "caller-priority"]];
  const models = [...new Set($("caller-models").value.split(",").map((each) => each.trim()).filter(Boolean))];
  const lines = (hash) => ["[[keys]]", `name = "${name}"`, `key_sha256 = "${hash}"`, ...models.length ? [`models = [${models.map((each) => JSON.stringify(each)).join(", ")}]`] : [], ...limits.filter(([, id]) => $(id).value).map(([key, id]) => `${key} = ${Number($(id).value)}`)].join("\n") + "\n";
  if (!crypto.subtle) {
    showNewKey(createElement("p", "warning", "Browsers compute hashes only on https and on localhost. Create the key with omni-proxy keys new, and put its hash here:"), createElement("pre", "box", lines("THE HASH")));
    return;
  }
  const random = btoa(String.fromCharCode(...crypto.getRandomValues(new Uint8Array(KEY_BYTES)))).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");
  const generated = `omni-${random}`, digest = new Uint8Array(await crypto.subtle.digest("SHA-256", new TextEncoder().encode(generated)));
  const hash = [...digest].map((each) => each.toString(16).padStart(2, "0")).join("");
  const numbers = limits.filter(([, id]) => $(id).value).map(([key, id]) => [key, Number($(id).value)]);
  const response = await callApi("POST", "keys", JSON.stringify({ name, key_sha256: hash, models, ...Object.fromEntries(numbers) }), JSON_HEADERS);
  if (!response.ok && response.status !== 403) {
    showNewKey(createElement("p", "error", `Not added: ${response.error}`));
    setText($("caller-submit"), "Add");
    return;
  }
  const file = snapshot?.config_file ?? "the configuration file";
  const entry = createElement("details", "", createElement("summary", "small", `Entry for ${file}, to keep the caller there instead`), createCopyBox(lines(hash)));
  entry.open = !response.ok;
  showNewKey(
    createElement("p", "", `The key of ${name}. It is shown once and never sent to the proxy:`), createCopyBox(generated),
    createElement("p", response.ok ? "ok" : "warning", response.ok ? "Active now. Its row shows its usage." : `Your key may not add callers (${response.error}). Add this entry to the configuration file:`), entry);
});
function createCopyBox(text) {
  const button = createButton("Copy", "", async () => {
    const copied = await navigator.clipboard?.writeText(text).then(() => true, () => false);
    setText(button, copied ? "Copied" : "Select the text to copy it");
  });
  return createElement("div", "copy-box", createElement("pre", "box", text), button);
}
