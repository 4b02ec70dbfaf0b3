/* Calls to the proxy, the admin key, and what a key may do. The key is kept for this tab alone. */
const KEY = "omni-proxy admin key";
let key = sessionStorage.getItem(KEY) ?? "";
/* A header is bytes: those of the key in UTF-8, as it stands in the file. */
const inBytes = (text) => String.fromCharCode(...new TextEncoder().encode(text));
const withKey = (headers = {}) => key ? { ...headers, Authorization: "Bearer " + inBytes(key) } : headers;

/* Answers {ok, status, body}; a failure has `why` in words. */
async function ask(method, path, body, headers) {
  let answer, told = {};
  try {
    answer = await fetch(path, { method, body, headers: withKey(headers), cache: "no-store", credentials: "omit" });
    told = await answer.json();
  } catch (error) {
    if (!answer) return { ok: false, status: 0, body: {}, why: "the proxy did not answer" };
  }
  const why = told?.error?.message ?? told?.message ?? `the proxy answered ${answer.status}`;
  if (locks(answer.status, told)) lock(answer.status, told);
  return { ok: answer.ok, status: answer.status, body: told, why };
}

const ELSEWHERE = "admin_listener_only";
/* A 403 that speaks of no key says in words what to set. */
const KEY_CODES = ["admin_key_required", "admin_key_invalid"];
/* A key whose role does not allow one action still shows the page. */
function locks(status, told) { return status === 401 || status === 403 && told?.error?.code !== "role_not_allowed"; }

/* ---- what the key of this reader may do ---- */
const NEEDS = { read: ["read", "operate", "weights", "all"], operate: ["operate", "all"], weights: ["weights", "all"], all: ["all"] };
const may = (role) => NEEDS[role].includes(last?.reader?.role ?? "all");
function whyNot(role) {
  const { name, role: has } = last.reader;
  return `${name ? `the key '${name}'` : "this reader"} has the role ${has}; this needs ${NEEDS[role].join(" or ")}`;
}
/* A button that the key may not use stays where it is, and says why. */
function permit(button, role, possible = true) {
  button.why = may(role) ? "" : whyNot(role);
  mark(button, "title", button.why);
  enable(button, possible && !button.why);
}

function close() {
  stop();
  last = null;
  points = [];
  for (const id of ["live", "lost", "locked", "elsewhere"]) show($(id), false);
  clean();
}
/* Control routes answer at another address: no key helps here. */
function leadOn(listen) {
  close();
  say($("elsewhere-at"), listen || "another address");
  const at = /^(.*):(\d+)$/.exec(listen ?? "");
  const any = at && ["0.0.0.0", "[::]"].includes(at[1]);
  const url = at && !listen.startsWith("unix:") ? `${location.protocol}//${any ? location.hostname : at[1]}:${at[2]}/dashboard` : "";
  const link = make("a", "", url);
  link.href = url;
  $("elsewhere-how").replaceChildren(...url ? ["Open ", link, ", from a machine that reaches it."] : ["It is a Unix socket: forward a port to it, as ssh -L does."]);
  show($("elsewhere"), true);
  say($("state"), "");
  say($("link"), "not here");
  document.title = "elsewhere · omni-proxy";
}
function lock(status, told) {
  if (told?.error?.code === ELSEWHERE) { leadOn(told.listen); return; }
  close();
  const refused = status === 403 && told?.error?.message && !KEY_CODES.includes(told.error.code);
  say($("locked-title"), refused ? "Access refused" : "Enter the admin API key");
  show($("unlock"), !refused);
  show($("locked-hint"), !refused);
  say($("locked-why"), refused ? told.error.message : status === 403 ? "Wrong key." : "");
  show($("locked"), true);
  say($("state"), "");
  say($("link"), refused ? "refused" : "locked");
  document.title = `${refused ? "refused" : "locked"} · omni-proxy`;
  if (!refused) $("key").focus();
}
/* Behind a lock nothing may be left to read: each part of the page says how it is emptied. */
const cleaners = [];
function clean() { for (const empty of cleaners) empty(); }
function empties(...ids) {
  cleaners.push(() => {
    for (const id of ids) {
      $(id).replaceChildren();
      $(id).told = undefined;
    }
  });
}
$("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  $("key").value = "";
  sessionStorage.setItem(KEY, key);
  show($("locked"), false);
  start();
});
$("forget").addEventListener("click", () => {
  key = "";
  sessionStorage.removeItem(KEY);
  lock(401);
});

