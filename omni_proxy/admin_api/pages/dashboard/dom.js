/* Creates and updates elements. Data from the network enters the page as text, never as markup. Only what differs is changed,
   so that nothing moves, loses its focus or is announced again. */
const $ = (id) => document.getElementById(id);
const SVG_NAMESPACE = "http://www.w3.org/2000/svg";

function createElement(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children.filter((each) => each !== null && each !== undefined && each !== ""));
  return element;
}
function createSvgElement(tag, attributes) {
  const element = document.createElementNS(SVG_NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}
function createButton(label, className, onClick) {
  const button = createElement("button", className, label);
  button.type = "button";
  button.addEventListener("click", (event) => {
    if (button.getAttribute("aria-disabled") !== "true") onClick(event, button);
    else if (button.disabledReason) notify(button.disabledReason, "warning");
  });
  return button;
}
function setText(element, text) { if (element.textContent !== text) element.textContent = text; }
function setClass(element, className) { if (element.className !== className) element.className = className; }
function setAttribute(element, name, value) { if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value); }
function setVisible(element, visible) { if (element.hidden === visible) element.hidden = !visible; }
function setEnabled(button, enabled) { setAttribute(button, "aria-disabled", !enabled); }
/* Replaces the children if `key`, the data that they show, has changed. */
function replaceIfChanged(element, key, build) {
  const renderedKey = JSON.stringify(key);
  if (element.renderedKey === renderedKey) return;
  element.renderedKey = renderedKey;
  element.replaceChildren(...build());
}
const isShown = ([, value]) => value !== null && value !== undefined && value !== "" && value !== false;
const term = ([name, value]) => [createElement("dt", "", name), createElement("dd", "", value)];
/* One pair per line, in two columns. */
function descriptionList(pairs) { return createElement("dl", "properties", ...pairs.filter(isShown).flatMap(term)); }
/* Several pairs per line; a pair is not broken. */
function inlineList(pairs) { return createElement("dl", "", ...pairs.filter(isShown).map((pair) => createElement("div", "", ...term(pair)))); }
