"use strict";
(() => {
  const MOST_MATCHES = 24, NO_ROW = 0xffffff;
  const at = (id) => document.getElementById(id);

  const copied = async (button) => {
    const text = button.dataset.copy;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      getSelection().selectAllChildren(button.previousElementSibling);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("[data-copy]");
    if (button) copied(button);
  });

  const described = at("search-data");
  if (!described) return;
  const meta = JSON.parse(described.textContent);
  const fine = meta.levels > 255, width = fine ? 2 : 1, NOT_FINITE = fine ? 0xffff : 0xff, ABSENT = NOT_FINITE - 1;

  const unpacked = async (name) => {
    const text = atob(at(`data-${name}`).textContent);
    const packed = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  };
  const numbers = async (name, width) => {
    const bytes = await unpacked(name), count = bytes.length / width, found = new Uint32Array(count);
    for (let plane = 0; plane < width; plane++)
      for (let index = 0; index < count; index++) found[index] |= bytes[plane * count + index] << (8 * plane);
    return found;
  };
  const summed = (steps) => {
    let sum = 0;
    return steps.map((step) => (sum = (sum + step) & NO_ROW));
  };
  const value = (level, { low, high }) =>
    level === 0 ? 0 : low * Math.exp((Math.log(high) - Math.log(low)) * (level - 1) / (meta.levels - 1));
  const figures = (number) => (number === 0 ? "0" : String(Number(number.toPrecision(fine ? 3 : 2))));

  const load = async () => {
    const texts = new TextDecoder().decode(await unpacked("texts")).split("\n");
    const tables = await Promise.all(meta.tables.map(async (table, index) => ({
      ...table,
      norms: await numbers(`table${index}-norms`, width),
      places: new Map(Array.from(summed(await numbers(`table${index}-looked-up`, 3)), (row, place) => [row, place])),
      nearest: await numbers(`table${index}-near`, 3),
      cosines: await numbers(`table${index}-cosines`, 1),
    })));
    return {
      texts,
      folded: texts.map((text) => text.toLowerCase()),
      ids: at("data-ids") ? summed(await numbers("ids", 3)) : null,
      names: at("data-names") ? new TextDecoder().decode(await unpacked("names")).split("\n") : null,
      classes: await numbers("classes", 3),
      changes: await Promise.all(meta.changes.map((_, index) => numbers(`changes${index}`, width))),
      tables,
    };
  };
  let loading;
  const loaded = () => (loading ??= load());
  const name = (data, row) => (data.names ? data.names[row] : data.ids ? data.ids[row] : row);

  const made = (tag, text, attributes = {}) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    for (const [key, content] of Object.entries(attributes)) element.setAttribute(key, content);
    return element;
  };
  const link = (data, row) => {
    const anchor = made("a", `${name(data, row)} `, { href: `#row=${row}`, class: "row" });
    if (data.texts[row]) anchor.append(made("bdi", data.texts[row], { class: "token" }));
    return anchor;
  };

  const found = (data, query) => {
    const wanted = query.toLowerCase(), rows = [];
    const add = (row) => { if (row >= 0 && !rows.includes(row)) rows.push(row); };
    const id = /^#?\d+$/.test(query) ? Number(query.replace("#", "")) : -1;
    const names = (text) => text.includes(String(id)) && text.split(/\D+/).includes(String(id));
    if (id >= 0 && data.names) data.names.forEach((text, row) => { if (names(text)) add(row); });
    else if (id >= 0) add(data.ids ? data.ids.indexOf(id) : id < meta.rows ? id : -1);
    const bare = (text) => text.replace(/^(?:##|[\u0121\u2581 ])+|<\/w>$/g, "");
    const starting = [], within = [];
    for (let row = 0; row < meta.rows && starting.length < 400; row++) {
      const text = data.folded[row];
      if (!text.includes(wanted)) continue;
      const word = bare(text);
      if (text === wanted || word === wanted) add(row);
      else if (word.startsWith(wanted)) starting.push(row);
      else if (within.length < MOST_MATCHES) within.push(row);
      if (rows.length > MOST_MATCHES) break;
    }
    starting.sort((one, other) => data.texts[one].length - data.texts[other].length || one - other);
    [...starting, ...within].forEach((row) => { if (rows.length <= MOST_MATCHES) add(row); });
    return rows;
  };

  const normOf = (table, row) => {
    const level = table.norms[row];
    if (level === ABSENT) return "not in this table";
    return level === NOT_FINITE ? "not finite" : `norm ${figures(value(level, table))}`;
  };
  const nearestOf = (data, table, row) => {
    const place = table.places.get(row);
    if (place === undefined) return made("p", table.norms[row] === ABSENT ? "" : "Its neighbours are not part of this page.");
    const body = made("tbody");
    for (let rank = 0; rank < table.near; rank++) {
      const other = table.nearest[place * table.near + rank];
      if (other === NO_ROW) continue;
      const line = made("tr"), token = made("td");
      token.append(link(data, other));
      const cosine = table.cosines[place * table.near + rank] / 127.5 - 1;
      line.append(token, made("td", cosine.toFixed(2), { class: "n" }));
      body.append(line);
    }
    const whole = made("table"), head = made("thead"), headings = made("tr");
    headings.append(made("th", "nearest row", { scope: "col" }), made("th", "cosine", { scope: "col", class: "n" }));
    head.append(headings);
    whole.append(made("caption", `The nearest rows in ${table.label}`), head, body);
    return whole;
  };
  const show = async (row, move) => {
    const data = await loaded(), entry = at("entry");
    const heading = made("h3", `Row ${name(data, row)} `);
    heading.append(made("bdi", data.texts[row] || "(no token)", { class: "token" }));
    entry.replaceChildren(heading);
    const tags = made("p");
    meta.classes.forEach((label, bit) => {
      if ((data.classes[row] >> bit) & 1) tags.append(made("span", label, { class: "tag" }));
    });
    if (tags.childElementCount) entry.append(tags);
    meta.changes.forEach((change, index) => {
      const level = data.changes[index][row];
      const share = level < ABSENT ? `${figures(100 * value(level, change))} % of the norm` : "";
      const moved = share || (level === ABSENT ? "from a row of zeros" : "not compared");
      entry.append(made("p", `${change.label}: ${moved}`));
    });
    const beside = made("div", undefined, { class: "beside" });
    for (const table of data.tables) {
      const part = made("div");
      part.append(made("p", `${table.label}: ${normOf(table, row)}`), nearestOf(data, table, row));
      beside.append(part);
    }
    entry.append(beside);
    if (move) {
      at("search").scrollIntoView({ block: "start" });
      entry.focus({ preventScroll: true });
    }
  };

  const note = at("matches-note"), list = at("matches"), query = at("query");
  note.textContent = typeof DecompressionStream === "function" ? "" : "This browser is too old for the search.";
  const search = async () => {
    const text = query.value.trim();
    if (!text) {
      list.replaceChildren();
      note.textContent = "";
      return;
    }
    const data = await loaded();
    if (text !== query.value.trim()) return;
    const rows = found(data, text);
    const more = rows.length > MOST_MATCHES;
    list.replaceChildren(...rows.slice(0, MOST_MATCHES).map((row) => {
      const item = made("li");
      item.append(link(data, row));
      return item;
    }));
    const some = more ? `The first ${MOST_MATCHES} rows` : rows.length === 1 ? "1 row" : `${rows.length} rows`;
    note.textContent = rows.length ? some : "No row has this text or id.";
    if (rows.length === 1) show(rows[0], false);
  };
  query.addEventListener("focus", () => { loaded(); });
  query.addEventListener("input", search);
  at("search").addEventListener("submit", async (event) => {
    event.preventDefault();
    const rows = found(await loaded(), query.value.trim());
    if (query.value.trim() && rows.length) show(rows[0], false);
  });
  const follow = () => {
    const wanted = /^#row=(\d+)$/.exec(location.hash);
    if (wanted && Number(wanted[1]) < meta.rows) show(Number(wanted[1]), true);
  };
  addEventListener("hashchange", follow);
  document.addEventListener("click", (event) => {
    const anchor = event.target.closest?.("a.row");
    if (anchor && anchor.hash === location.hash) follow();
  });
  follow();
})();
