/* The last reload of the configuration, and the running one. */
empties("config-facts", "config-last", "config-result", "running-text");
cleaners.push(() => { $("running").open = false; });
const OUTCOMES = { applied: ["applied", "ok"], refused: ["refused, what ran before still runs", "bad"], unchanged: ["nothing had changed", ""], started: ["read at the start", "ok"] };
function paintConfig() {
  const reload = last.last_reload ?? {};
  const [words, kind] = OUTCOMES[reload.outcome] ?? [reload.outcome ?? "none", ""];
  const where = { file: "its file changed", http: "asked over HTTP", start: "" }[reload.source] ?? reload.source ?? "";
  $("reload").title = may("operate") ? "" : whyNot("operate");
  enable($("reload"), may("operate"));
  fill($("config-facts"), [last.config_file, last.revision, reload], () => [
    ["File", last.config_file ?? "none, only flags"], ["Revision", count(last.revision)],
    ["Last reading", make("span", "", make("b", kind, words), make("span", "quiet", reload.at ? " · " : "", reload.at ? time(reload.at) : "", where ? ` · ${where}` : ""))],
  ].flatMap(([name, value]) => [make("dt", "", name), make("dd", "", value)]));
  fill($("config-last"), reload, () => [...refusal(reload.error), ...changes(reload.diff)]);
}
function refusal(error) {
  if (!error) return [];
  const lines = error.problems?.length ? error.problems.map((each) => `${error.file ?? "file"}${each.line ? ":" + each.line : ""}  ${each.path}: ${each.reason}${each.hint ? `; ${each.hint}` : ""}`) : [error.message ?? plain(error)];
  return [make("div", "box bad", make("pre", "", lines.join("\n")))];
}
function changes(diff) {
  if (!diff) return [];
  const lines = [];
  const change = (name, [from, to]) => lines.push(make("div", "mono", name + ": ", make("del", "", plain(from)), " → ", make("ins", "", plain(to))));
  for (const [name, pair] of Object.entries(diff.changed ?? {})) change(name, pair);
  for (const table of ["workers", "launch"]) {
    const { added = [], removed = [], changed = {} } = diff[table] ?? {};
    const word = table === "workers" ? "worker" : "launch group";
    for (const name of added) lines.push(make("div", "mono", make("ins", "", `+ ${word} ${short(name)}`)));
    for (const name of removed) lines.push(make("div", "mono", make("del", "", `− ${word} ${short(name)}`)));
    for (const [name, keys] of Object.entries(changed)) for (const [each, pair] of Object.entries(keys)) change(`${short(name)} ${each}`, pair);
  }
  return lines.length ? [make("div", "diff", make("h3", "", "What it changed"), ...lines)] : [];
}
$("reload").addEventListener("click", async () => {
  if (!may("operate")) { say($("config-result"), whyNot("operate")); dress($("config-result"), "small warn"); return; }
  say($("config-result"), "reading …");
  dress($("config-result"), "small quiet");
  const answer = await ask("POST", "reload");
  if (locks(answer.status, answer.body)) return;
  const [words] = OUTCOMES[answer.body.outcome] ?? [answer.why];
  say($("config-result"), `${clock(Date.now() / 1000)}: ${words}`);
  dress($("config-result"), answer.ok ? "small ok" : "small bad");
});
$("running").addEventListener("toggle", async () => {
  if (!$("running").open) return;
  const answer = await ask("GET", "config");
  say($("running-text"), answer.ok ? JSON.stringify(answer.body.config, null, 2) : answer.why);
});

