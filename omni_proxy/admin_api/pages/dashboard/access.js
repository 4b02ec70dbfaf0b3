/* Calls to the admin API, signing in, and what the role of the key allows. The key is stored for this tab only. */
const KEY_STORAGE_NAME = "omni-proxy admin key";
let adminKey = sessionStorage.getItem(KEY_STORAGE_NAME) ?? "";
/* A header field is bytes: the key is sent in UTF-8, as in the configuration file. */
const utf8Bytes = (text) => String.fromCharCode(...new TextEncoder().encode(text));
const withAdminKey = (headers = {}) => adminKey ? { ...headers, Authorization: "Bearer " + utf8Bytes(adminKey) } : headers;

/* Returns {ok, status, body, error}; `error` is the message of a failure. */
async function callApi(method, path, requestBody, headers) {
  let response, body = {};
  try {
    response = await fetch(path, { method, body: requestBody, headers: withAdminKey(headers), cache: "no-store", credentials: "omit" });
    body = await response.json();
  } catch {
    if (!response) return { ok: false, status: 0, body: {}, error: "no response from the proxy" };
  }
  const error = body?.error?.message ?? body?.message ?? `status ${response.status}`;
  if (needsSignIn(response.status, body)) showSignIn(response.status, body);
  return { ok: response.ok, status: response.status, body, error };
}

const ADMIN_LISTENER_ONLY = "admin_listener_only";
/* Any other 403 has a message that says what to configure. */
const KEY_ERROR_CODES = ["admin_key_required", "admin_key_invalid"];
/* The page stays visible if the key's role does not allow one action. */
function needsSignIn(status, body) { return status === 401 || status === 403 && body?.error?.code !== "role_not_allowed"; }

/* ---- permissions of the key ---- */
const ALLOWED_ROLES = { read: ["read", "operate", "weights", "all"], operate: ["operate", "all"], weights: ["weights", "all"], all: ["all"] };
const isAllowed = (role) => ALLOWED_ROLES[role].includes(snapshot?.reader?.role ?? "all");
function notAllowedText(role) {
  const { name, role: ownRole } = snapshot.reader;
  return `${name ? `the key '${name}'` : "this client"} has the role ${ownRole}; this action needs ${ALLOWED_ROLES[role].join(" or ")}`;
}
/* A button that the role does not allow stays visible; its tooltip has the reason. */
function setPermission(button, role, possible = true) {
  button.disabledReason = isAllowed(role) ? "" : notAllowedText(role);
  setAttribute(button, "title", button.disabledReason);
  setEnabled(button, possible && !button.disabledReason);
}

function hidePage() {
  stopFeed();
  snapshot = null;
  points = [];
  for (const id of ["content", "disconnected", "sign-in", "admin-listener"]) setVisible($(id), false);
  clearPage();
}
/* Control routes are served at another address: a key would not help. */
function showAdminListener(listen) {
  hidePage();
  setText($("admin-listener-address"), listen || "another address");
  const address = /^(.*):(\d+)$/.exec(listen ?? "");
  const isWildcard = address && ["0.0.0.0", "[::]"].includes(address[1]);
  const url = address && !listen.startsWith("unix:") ? `${location.protocol}//${isWildcard ? location.hostname : address[1]}:${address[2]}/dashboard` : "";
  const link = createElement("a", "", url);
  link.href = url;
  $("admin-listener-link").replaceChildren(...url ? ["Open ", link, " from a machine that can reach it."] : ["It is a Unix socket: forward a port to it, for example with ssh -L."]);
  setVisible($("admin-listener"), true);
  setText($("state"), "");
  setText($("connection"), "not on this port");
  document.title = "not on this port · omni-proxy";
}
function showSignIn(status, body) {
  if (body?.error?.code === ADMIN_LISTENER_ONLY) { showAdminListener(body.listen); return; }
  hidePage();
  const refused = status === 403 && body?.error?.message && !KEY_ERROR_CODES.includes(body.error.code);
  setText($("sign-in-title"), refused ? "Access refused" : "Enter the admin API key");
  setVisible($("sign-in-form"), !refused);
  setVisible($("sign-in-hint"), !refused);
  setText($("sign-in-error"), refused ? body.error.message : status === 403 ? "Invalid key." : "");
  setVisible($("sign-in"), true);
  setText($("state"), "");
  setText($("connection"), refused ? "access refused" : "signed out");
  document.title = `${refused ? "access refused" : "signed out"} · omni-proxy`;
  if (!refused) $("admin-key").focus();
}
/* The page must contain no data after a sign-out: each part registers how it is cleared. */
const clearFunctions = [];
function clearPage() { for (const clear of clearFunctions) clear(); }
function clearOnSignOut(...ids) {
  clearFunctions.push(() => {
    for (const id of ids) {
      $(id).replaceChildren();
      $(id).renderedKey = undefined;
    }
  });
}
$("sign-in-form").addEventListener("submit", (event) => {
  event.preventDefault();
  adminKey = $("admin-key").value.trim();
  $("admin-key").value = "";
  sessionStorage.setItem(KEY_STORAGE_NAME, adminKey);
  setVisible($("sign-in"), false);
  startFeed();
});
$("sign-out").addEventListener("click", () => {
  adminKey = "";
  sessionStorage.removeItem(KEY_STORAGE_NAME);
  showSignIn(401);
});

