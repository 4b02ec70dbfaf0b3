/* Calls to the proxy, the admin key, and what a key may do. The key is stored for this tab only. */
const KEY = "omni-proxy admin key";
let key = sessionStorage.getItem(KEY) ?? "";
/* A header field is bytes: the key is sent in UTF-8, as in the configuration file. */
const inBytes = (text) => String.fromCharCode(...new TextEncoder().encode(text));
const withKey = (headers = {}) => key ? { ...headers, Authorization: "Bearer " + inBytes(key) } : headers;

/* Returns {ok, status, body, why}; `why` is the error message of a failure. */
async function ask(method, path, body, headers) {
  let answer, data = {};
  try {
    answer = await fetch(path, { method, body, headers: withKey(headers), cache: "no-store", credentials: "omit" });
    data = await answer.json();
  } catch (error) {
    if (!answer) return { ok: false, status: 0, body: {}, why: "the proxy did not answer" };
  }
  const why = data?.error?.message ?? data?.message ?? `the proxy answered ${answer.status}`;
  if (locks(answer.status, data)) lock(answer.status, data);
  return { ok: answer.ok, status: answer.status, body: data, why };
}

const ELSEWHERE = "admin_listener_only";
/* Any other 403 has a message that says what to configure. */
const KEY_CODES = ["admin_key_required", "admin_key_invalid"];
/* The page stays visible if the key's role does not allow one action. */
function locks(status, data) { return status === 401 || status === 403 && data?.error?.code !== "role_not_allowed"; }

/* ---- permissions of the reader's key ---- */
const NEEDS = { read: ["read", "operate", "weights", "all"], operate: ["operate", "all"], weights: ["weights", "all"], all: ["all"] };
const may = (role) => NEEDS[role].includes(last?.reader?.role ?? "all");
function whyNot(role) {
  const { name, role: has } = last.reader;
  return `${name ? `the key '${name}'` : "this reader"} has the role ${has}; this needs ${NEEDS[role].join(" or ")}`;
}
/* A button that the key may not use stays visible, and its tooltip gives the reason. */
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
/* Control routes are served at another address: a key would not help. */
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
function lock(status, data) {
  if (data?.error?.code === ELSEWHERE) { leadOn(data.listen); return; }
  close();
  const refused = status === 403 && data?.error?.message && !KEY_CODES.includes(data.error.code);
  say($("locked-title"), refused ? "Access refused" : "Enter the admin API key");
  show($("unlock"), !refused);
  show($("locked-hint"), !refused);
  say($("locked-why"), refused ? data.error.message : status === 403 ? "Wrong key." : "");
  show($("locked"), true);
  say($("state"), "");
  say($("link"), refused ? "refused" : "locked");
  document.title = `${refused ? "refused" : "locked"} · omni-proxy`;
  if (!refused) $("key").focus();
}
/* A locked page must not contain data: each part registers how it is cleared. */
const cleaners = [];
function clean() { for (const empty of cleaners) empty(); }
function empties(...ids) {
  cleaners.push(() => {
    for (const id of ids) {
      $(id).replaceChildren();
      $(id).filled = undefined;
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

