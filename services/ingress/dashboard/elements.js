// The parts the page is built of: elements, rows of a table, choices of a list. Text goes in as textContent alone.

export const byId = (id) => document.getElementById(id);

export function element(name, text, className) {
  const made = document.createElement(name);
  if (text != null) made.textContent = text;
  if (className) made.className = className;
  return made;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** `rows` become the body's children in this order; those that stay are not touched, and keep the focus. */
export function arrange(body, rows) {
  let at = body.firstChild;
  for (const row of rows) {
    if (row === at) at = at.nextSibling;
    else body.insertBefore(row, at);
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

/** A row of text cells; null leaves one as it is. */
export class Row {
  constructor(columns) {
    this.node = element('tr');
    this.cells = columns.map(([name, className]) => {
      const cell = element('td', '', className);
      cell.dataset.column = name;
      this.node.append(cell);
      return cell;
    });
  }

  fill(texts) {
    texts.forEach((text, at) => {
      const cell = this.cells[at];
      if (text === null || cell.textContent === text) return;
      cell.textContent = text;
      if (cell.classList.contains('name')) cell.title = text; // what does not fit is cut
    });
  }
}

/** The choice that was made stays, while there is one of that name. `first`: a choice before all names. */
export function fillChoices(select, names, first = []) {
  const wanted = [...first.map(([value]) => value), ...names];
  if (JSON.stringify([...select.options].map((one) => one.value)) === JSON.stringify(wanted)) return;
  const chosen = select.value;
  const made = [...first, ...names.map((name) => [name, name])].map(([value, label]) => {
    const option = element('option', label);
    option.value = value;
    return option;
  });
  select.replaceChildren(...made);
  if (wanted.includes(chosen)) select.value = chosen;
}
