/* Keyboard shortcuts of the page; they are inactive while the user types into a field. */
const HELP = [["/", "search the workers"], ["a", "add a worker"], ["1 2 3", "15 minutes, 1 hour, 6 hours"], ["c", "to the chat"], ["Esc", "close, or leave the search"], ["Tab, Enter", "every button; a chart also takes ← and →"], ["?", "this list"]];
$("help-keys").append(...HELP.flatMap(([keys, words]) => [make("dt", "", make("kbd", "", keys)), make("dd", "", words)]));
$("help").addEventListener("click", () => $("helping").showModal());
$("helping-no").addEventListener("click", () => $("helping").close());
document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, textarea, select, dialog");
  if (event.key === "Escape" && event.target.id === "find") {
    $("find").value = "";
    if (last) paint();
    event.target.blur();
  }
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !last) return;
  const act = { "/": () => $("find").focus(), "?": () => $("helping").showModal(), a: () => $("add").click(), c: () => $("chat-text").focus(), 1: () => choose(900, scope), 2: () => choose(3600, scope), 3: () => choose(21600, scope) }[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});
