/* Keyboard shortcuts; inactive while the user types into a field. */
const SHORTCUTS = [["/", "search the workers"], ["a", "add a worker"], ["1 2 3", "show 15 minutes, 1 hour, 6 hours"], ["c", "go to the chat"], ["Esc", "close a dialog, or clear the search"], ["Tab, Enter", "reach every button; ← and → move along a chart"], ["?", "this list"]];
$("shortcuts").append(...SHORTCUTS.flatMap(([keys, text]) => [createElement("dt", "", createElement("kbd", "", keys)), createElement("dd", "", text)]));
$("help").addEventListener("click", () => $("help-dialog").showModal());
$("help-close").addEventListener("click", () => $("help-dialog").close());
document.addEventListener("keydown", (event) => {
  const isTyping = event.target.closest("input, textarea, select, dialog");
  if (event.key === "Escape" && event.target.id === "worker-search") {
    $("worker-search").value = "";
    if (snapshot) render();
    event.target.blur();
  }
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || !snapshot) return;
  const action = { "/": () => $("worker-search").focus(), "?": () => $("help-dialog").showModal(), a: () => $("add-worker").click(), c: () => $("chat-input").focus(), 1: () => selectCharts(900, scope), 2: () => selectCharts(3600, scope), 3: () => selectCharts(21600, scope) }[event.key];
  if (!action) return;
  event.preventDefault();
  action();
});
