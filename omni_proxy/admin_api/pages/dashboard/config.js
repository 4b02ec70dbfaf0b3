/* The last reload of the configuration, and the effective configuration. */
clearOnSignOut("config-properties", "config-changes", "config-message", "effective-config-text");
clearFunctions.push(() => { $("effective-config").open = false; });
const RELOAD_OUTCOMES = { applied: ["applied", "ok"], refused: ["refused; the previous configuration stays active", "error"], unchanged: ["unchanged", ""], started: ["read at startup", "ok"] };
function renderConfig() {
  const reload = snapshot.last_reload ?? {};
  const [text, kind] = RELOAD_OUTCOMES[reload.outcome] ?? [reload.outcome ?? "none", ""];
  const source = { file: "the file changed", http: "requested over HTTP", start: "" }[reload.source] ?? reload.source ?? "";
  $("reload").title = isAllowed("operate") ? "" : notAllowedText("operate");
  setEnabled($("reload"), isAllowed("operate"));
  replaceIfChanged($("config-properties"), [snapshot.config_file, snapshot.revision, reload], () => [
    ["File", snapshot.config_file ?? "none (flags only)"], ["Revision", formatNumber(snapshot.revision)],
    ["Last reload", createElement("span", "", createElement("b", kind, text), createElement("span", "muted", reload.at ? " · " : "", reload.at ? createTime(reload.at) : "", source ? ` · ${source}` : ""))],
  ].flatMap(term));
  replaceIfChanged($("config-changes"), reload, () => [...reloadError(reload.error), ...reloadChanges(reload.diff)]);
}
function reloadError(error) {
  if (!error) return [];
  const lines = error.problems?.length ? error.problems.map((each) => `${error.file ?? "file"}${each.line ? ":" + each.line : ""}  ${each.path}: ${each.reason}${each.hint ? `; ${each.hint}` : ""}`) : [error.message ?? toText(error)];
  return [createElement("div", "box error", createElement("pre", "", lines.join("\n")))];
}
function reloadChanges(diff) {
  if (!diff) return [];
  const lines = [];
  const change = (name, [from, to]) => lines.push(createElement("div", "mono", name + ": ", createElement("del", "", toText(from)), " → ", createElement("ins", "", toText(to))));
  for (const [name, pair] of Object.entries(diff.changed ?? {})) change(name, pair);
  for (const table of ["workers", "launch"]) {
    const { added = [], removed = [], changed = {} } = diff[table] ?? {};
    const label = table === "workers" ? "worker" : "launch group";
    for (const name of added) lines.push(createElement("div", "mono", createElement("ins", "", `+ ${label} ${shortUrl(name)}`)));
    for (const name of removed) lines.push(createElement("div", "mono", createElement("del", "", `− ${label} ${shortUrl(name)}`)));
    for (const [name, keys] of Object.entries(changed)) for (const [each, pair] of Object.entries(keys)) change(`${shortUrl(name)} ${each}`, pair);
  }
  return lines.length ? [createElement("div", "diff", createElement("h3", "", "Changes"), ...lines)] : [];
}
$("reload").addEventListener("click", async () => {
  if (!isAllowed("operate")) { setText($("config-message"), notAllowedText("operate")); setClass($("config-message"), "small warning"); return; }
  setText($("config-message"), "Reloading …");
  setClass($("config-message"), "small muted");
  const response = await callApi("POST", "reload");
  if (needsSignIn(response.status, response.body)) return;
  const [text] = RELOAD_OUTCOMES[response.body.outcome] ?? [response.error];
  setText($("config-message"), `${formatTime(Date.now() / 1000)}: ${text}`);
  setClass($("config-message"), response.ok ? "small ok" : "small error");
});
$("effective-config").addEventListener("toggle", async () => {
  if (!$("effective-config").open) return;
  const response = await callApi("GET", "config");
  setText($("effective-config-text"), response.ok ? JSON.stringify(response.body.config, null, 2) : response.error);
});

