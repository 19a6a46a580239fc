"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const make = (tag, text, attributes = {}) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };

  // ---- the model: a tree with one stop of the Tab key
  const tree = document.getElementById("tree"), detail = document.getElementById("detail");
  const all = [...tree.querySelectorAll("[role=treeitem]")], level = (item) => Number(item.getAttribute("aria-level"));
  const hide = () => {
    let closed = Infinity;  // the level of a closed block that what follows is inside of
    for (const item of all) {
      if (level(item) <= closed) closed = Infinity;
      item.hidden = closed !== Infinity;
      if (closed === Infinity && item.getAttribute("aria-expanded") === "false") closed = level(item);
    }
  };
  const items = () => all.filter((one) => !one.hidden);
  const open = (item, value) => {
    if (item.hasAttribute("aria-expanded")) item.setAttribute("aria-expanded", value);
    hide();
  };
  const focus = (item) => {
    if (!item) return;
    for (const one of tree.querySelectorAll("[tabindex='0']")) one.tabIndex = -1;
    item.tabIndex = 0;
    item.focus();
  };
  const above = (item) => all.slice(0, all.indexOf(item)).reverse().find((one) => level(one) < level(item));
  const path = (item) => {
    const names = [];
    for (let one = item; one; one = above(one)) names.unshift(one.querySelector("code").textContent);
    return names.join(".");
  };
  const table = (caption, head, rows) => {
    const scroll = make("div", undefined, { class: "scroll", role: "region", tabindex: "0", "aria-label": caption });
    const one = make("table"), top = make("thead"), row = make("tr"), body = make("tbody");
    one.append(make("caption", caption));
    for (const cell of head) row.append(make("th", cell, { scope: "col" }));
    top.append(row);
    for (const cells of rows) body.append(cells);
    one.append(top, body);
    scroll.append(one);
    return scroll;
  };
  const line = (cells, heading) => {
    const row = make("tr");
    cells.forEach((cell, i) => {
      const element = make(i === 0 && heading ? "th" : "td");
      if (i === 0 && heading) element.scope = "row";
      element.append(make("code", cell));
      if (i === cells.length - 1 && cell) element.className = "msg";
      row.append(element);
    });
    return row;
  };
  const show = (item) => {
    for (const one of tree.querySelectorAll("[aria-selected=true]")) one.setAttribute("aria-selected", "false");
    item.setAttribute("aria-selected", "true");
    let owner = item;
    while (owner && !("code" in owner.dataset)) owner = above(owner);
    detail.replaceChildren(make("h3", path(item)));
    const about = JSON.parse(item.dataset.about);
    if (about.length) {
      detail.append(table("On the rank that holds most of it", ["What", "Answer"], about.map(([what, text]) => {
        const row = make("tr");
        row.append(make("th", what, { scope: "row" }), make("td", text));
        return row;
      })));
    }
    if (!owner) return;
    const code = data.codes[owner.dataset.code];
    if (owner !== item) detail.append(make("p", `Part of ${path(owner)}, which does:`, { class: "dim" }));
    for (const one of code.functions) {
      const rows = one.arguments.map(([name, spec]) => line([name, "given", spec, ""], true));
      for (const [source, outs, call, specs, messages] of one.lines) {
        if (source) {
          const row = make("tr", undefined, { class: "src" });
          row.append(make("th", source, { scope: "rowgroup", colspan: "4" }));
          rows.push(row);
        }
        rows.push(line([outs || "–", call, specs, messages], true));
      }
      detail.append(table(`${code.name}, ${one.name}`, ["Value", "Made by", "Spec", "Messages"], rows));
    }
  };
  tree.addEventListener("click", (event) => {
    const item = event.target.closest("[role=treeitem]");
    if (!item) return;
    focus(item);
    if (event.target.closest(".twist") || item.getAttribute("aria-selected") === "true" || item.getAttribute("aria-expanded") === "false") {
      open(item, item.getAttribute("aria-expanded") !== "true");
    }
    show(item);
  });
  tree.addEventListener("keydown", (event) => {
    const item = event.target.closest("[role=treeitem]"), shown = items(), at = shown.indexOf(item);
    const state = item.getAttribute("aria-expanded");
    const acts = {
      ArrowDown: () => focus(shown[at + 1]),
      ArrowUp: () => focus(shown[at - 1]),
      Home: () => focus(shown[0]),
      End: () => focus(shown[shown.length - 1]),
      ArrowRight: () => (state === "false" ? open(item, true) : state === "true" ? focus(shown[at + 1]) : 0),
      ArrowLeft: () => (state === "true" ? open(item, false) : focus(above(item))),
      Enter: () => show(item),
      " ": () => show(item),
    };
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (acts[event.key]) {
      acts[event.key]();
      event.preventDefault();
    } else if (event.key.length === 1) {
      const starts = (one) => one.querySelector("code").textContent.toLowerCase().startsWith(event.key.toLowerCase());
      focus([...shown.slice(at + 1), ...shown.slice(0, at)].find(starts));
    }
  });

  hide();

  // ---- the schedule: lanes on a canvas, of which only what is seen is drawn
  const TICKS = 1e6, LEFT = 86, ROW = 24, THIN = 7, AXIS = 26, KINDS = "FBW", WORDS = ["forward", "backward", "weight gradients"];
  const lanes = data.lanes, holder = document.getElementById("lanes"), canvas = document.getElementById("canvas");
  const seen = document.getElementById("seen"), button = (name) => document.querySelector(`[data-do=${name}]`);
  const alike = lanes.rows.some((row) => row.like !== null), some = (...names) => names.some((name) => Object.keys(lanes[name]).length);
  const travels = lanes.rows.some((row) => row.sent.length || row.received.length);
  // thin lanes of messages below the actions: in layers, of parameters, between groups
  const THINS = [["layers", some("hidden", "shown")], ["parameters", some("beside", "once")], ["groups", travels]].filter((one) => one[1]).map((one) => one[0]);
  let begin = 0, end = 1, folded = alike, messages = THINS.length > 0, rows = [], printing = false;
  button("fold").hidden = !alike;
  button("messages").hidden = !messages;
  const seconds = (s) => {
    for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]]) {
      if (Math.abs(s) >= scale) return `${Number((s / scale).toPrecision(3))} ${unit}`;
    }
    return "0 s";
  };
  const time = (tick) => seconds((tick / TICKS) * lanes.span_s);
  for (const row of lanes.rows) {  // the first forward and the last backward of every stage have messages of their own beside them
    row.once = new Set();
    const first = {}, last = {};
    for (let n = 0; n < row.bars.length; n += 5) {
      const stage = row.bars[n + 1];
      if (row.bars[n] === 0) first[stage] ??= n;
      if (row.bars[n] === 1) last[stage] = n;
    }
    for (const n of [...Object.values(first), ...Object.values(last)]) row.once.add(n);
  }
  const layout = () => {
    rows = [];
    let skipped = 0;
    lanes.rows.forEach((row, i) => {
      const next = lanes.rows[i + 1], last = !next || next.like !== row.like;
      if (!folded || row.like === null || last) {
        if (skipped) rows.push({ gap: skipped, tall: ROW });
        skipped = 0;
        rows.push({ ...row, tall: ROW + (messages ? THIN * THINS.length + 3 : 0) });
      } else skipped += 1;
    });
    if (lanes.ends.length) rows.push({ ends: lanes.ends, name: "step’s end", tall: ROW });
    let top = 4;
    for (const row of rows) { row.top = top; top += row.tall; }
    button("fold").setAttribute("aria-pressed", String(!folded));
    button("fold").textContent = folded ? "Show lanes that are alike" : "Fold lanes that are alike";
    button("messages").setAttribute("aria-pressed", String(messages));
  };
  const colours = () => {
    const dark = !printing && matchMedia("(prefers-color-scheme: dark)").matches;
    return dark ? { fg: "#e8eaed", dim: "#a8b0b9", line: "#343a41", bg: "#14171a" } : { fg: "#1b1f24", dim: "#57606a", line: "#d5dae0", bg: "#ffffff" };
  };
  const FILL = ["#1f5fbf", "#23703a", "#a04a00"], LIGHTER = ["#3a72c4", "#2f8050", "#b05a14"];
  const MESSAGE = { hidden: "#7b848e", shown: "#d4473c", parameters: "#a3841a", sent: "#9a5cd0", received: "#1a93a8" };
  const ENDS = ["#0b6b7d", "#7a6000", "#7a3fb0", "#5a6068"];
  const firstAfter = (bars, tick) => {
    let low = 0, high = bars.length / 5;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (bars[5 * middle + 3] + bars[5 * middle + 4] < tick) low = middle + 1;
      else high = middle;
    }
    return low;
  };
  // what travels beside an action: kind of message, start, length
  const beside = (row, n) => {
    const [kind, stage, , start, long] = row.bars.slice(n, n + 5), key = KINDS[kind] + stage, found = [];
    const hidden = Math.min(lanes.hidden[key] || 0, long), shown = Math.min(lanes.shown[key] || 0, long);
    const parameters = Math.min((lanes.beside[key] || 0) + (row.once.has(n) ? lanes.once[key] || 0 : 0), long);
    if (hidden) found.push(["hidden", start, hidden]);
    if (shown) found.push(["shown", start + long - shown, shown]);
    if (parameters) found.push(["parameters", start, parameters]);
    return found;
  };
  const draw = () => {
    const bottom = rows.reduce((sum, row) => sum + row.tall, 6), width = holder.clientWidth, height = bottom + AXIS, ratio = window.devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d"), colour = colours(), wide = width - LEFT - 10;
    const x = (tick) => LEFT + ((tick / TICKS - begin) / (end - begin)) * wide;
    const bar = (start, long, top, tall, fill) => {
      const from = x(start), size = Math.max(x(start + long) - from, 0.6);
      pen.fillStyle = fill;
      pen.fillRect(from, top, size > 3 ? size - 0.8 : size, tall);
      return [from, size];
    };
    const label = (texts, from, size, top, tall) => {
      const text = texts.find((one) => size > 8 * one.length + (one === texts[0] ? 4 : 2));
      if (!text) return;
      pen.fillStyle = "#ffffff";
      pen.fillText(text, from + size / 2, top + tall / 2 + 0.5);
    };
    pen.scale(ratio, ratio);
    pen.fillStyle = colour.bg;
    pen.fillRect(0, 0, width, height);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    for (const row of rows) {
      const top = row.top, tall = ROW - 5;
      pen.textAlign = "left";
      pen.fillStyle = row.gap ? colour.dim : colour.fg;
      pen.fillText(row.gap ? `⋮ ${row.gap} alike` : row.name, 8, top + tall / 2, LEFT - 14);
      if (row.gap) continue;
      pen.save();
      pen.beginPath();
      pen.rect(LEFT, top, wide, row.tall - 3);
      pen.clip();
      pen.textAlign = "center";
      if (row.ends) {
        let at = lanes.over;
        row.ends.forEach(([what, long], i) => {
          const [from, size] = bar(at, long, top, tall, ENDS[i % 4]);
          label([what], from, size, top, tall);
          at += long;
        });
        pen.restore();
        continue;
      }
      const bars = row.bars, thin = (name) => top + tall + 1 + THIN * THINS.indexOf(name);
      for (let n = firstAfter(bars, begin * TICKS); n < bars.length / 5; n++) {
        const kind = bars[5 * n], mb = bars[5 * n + 2], start = bars[5 * n + 3], long = bars[5 * n + 4];
        if (start / TICKS > end) break;
        const [from, size] = bar(start, long, top, tall, (mb % 2 ? LIGHTER : FILL)[kind]);
        if (kind > 0 && size > 1.5) {
          pen.fillStyle = "rgba(255,255,255,0.85)";
          pen.fillRect(from, kind === 1 ? top : top + tall - 2, size > 3 ? size - 0.8 : size, 2);
        }
        label([KINDS[kind] + mb, String(mb)], from, size, top, tall);
        if (!messages) continue;
        for (const [what, begins, lasts] of beside(row, 5 * n)) bar(begins, lasts, thin(what === "parameters" ? what : "layers"), THIN - 2, MESSAGE[what]);
      }
      if (messages && travels) {
        for (const [what, above] of [["sent", 0], ["received", (THIN - 1) / 2]]) {
          for (let n = firstAfter(row[what], begin * TICKS); n < row[what].length / 5; n++) {
            if (row[what][5 * n + 3] / TICKS > end) continue;  // they are in the order of their ends
            bar(row[what][5 * n + 3], row[what][5 * n + 4], thin("groups") + above, (THIN - 1) / 2, MESSAGE[what]);
          }
        }
      }
      pen.restore();
    }
    pen.strokeStyle = colour.dim;
    pen.beginPath();
    pen.moveTo(LEFT, bottom);
    pen.lineTo(LEFT + wide, bottom);
    pen.stroke();
    const marks = Math.max(2, Math.min(8, Math.floor(wide / 90)));
    for (let k = 0; k <= marks; k++) {
      const at = begin + ((end - begin) * k) / marks;
      pen.textAlign = k === 0 ? "left" : k === marks ? "right" : "center";
      pen.fillStyle = colour.dim;
      pen.fillText(seconds(at * lanes.span_s), LEFT + (wide * k) / marks, bottom + 13);
    }
  };
  const tell = () => {
    seen.textContent = `Shown: ${seconds(begin * lanes.span_s)} to ${seconds(end * lanes.span_s)} of ${seconds(lanes.span_s)}.`;
  };
  const move = (by) => {
    const step = Math.max(-begin, Math.min(1 - end, by * (end - begin)));
    begin += step;
    end += step;
  };
  const zoom = (factor, at = (begin + end) / 2) => {
    const length = Math.min(1, Math.max(1e-4, (end - begin) * factor)), part = (at - begin) / (end - begin);
    begin = Math.max(0, Math.min(1 - length, at - part * length));
    end = begin + length;
  };
  const acts = {
    in: () => zoom(0.5),
    out: () => zoom(2),
    left: () => move(-0.25),
    right: () => move(0.25),
    all: () => { begin = 0; end = 1; },
    fold: () => { folded = alike && !folded; layout(); },
    messages: () => { messages = THINS.length > 0 && !messages; layout(); },
  };
  const act = (name) => { acts[name](); draw(); tell(); };
  document.querySelector(".controls").addEventListener("click", (event) => {
    const name = event.target.closest("button")?.dataset.do;
    if (name) act(name);
  });
  const keys = { "+": "in", "=": "in", "-": "out", _: "out", ArrowLeft: "left", ArrowRight: "right", Home: "all", 0: "all", m: "messages", f: "fold" };
  holder.addEventListener("keydown", (event) => {
    if (keys[event.key] && !event.ctrlKey && !event.metaKey && !event.altKey) {
      act(keys[event.key]);
      event.preventDefault();
    }
  });
  const place = (event) => {
    const box = canvas.getBoundingClientRect(), y = event.clientY - box.top;
    return [begin + ((event.clientX - box.left - LEFT) / (box.width - LEFT - 10)) * (end - begin), rows.find((row) => y >= row.top && y < row.top + row.tall)];
  };
  const SAID = { hidden: "messages in layers, hidden,", shown: "messages in layers, exposed,", parameters: "messages of parameters" };
  const about = (row, tick) => {
    if (row.ends) {
      let at = lanes.over;
      for (const [what, long] of row.ends) {
        if (tick >= at && tick <= at + long) return `When all actions are over: ${what}, ${time(long)}.`;
        at += long;
      }
      return "";
    }
    const n = 5 * firstAfter(row.bars, tick), [kind, stage, mb, start, long] = row.bars.slice(n, n + 5), said = [];
    if (kind !== undefined && start <= tick) {
      said.push(`${WORDS[kind]} of microbatch ${mb}, stage ${stage}, ${time(start)} to ${time(start + long)}`);
      for (const [what, , lasts] of beside(row, n)) said.push(`${SAID[what]} ${time(lasts)}`);
    } else said.push(`idle at ${time(tick)}`);
    for (const [what, way] of [["sent", "to"], ["received", "from"]]) {
      const m = 5 * firstAfter(row[what], tick), [of, number, other, from, lasts] = row[what].slice(m, m + 5);
      if (of !== undefined && from <= tick) said.push(`${KINDS[of]}${number} ${what} ${way} group ${other} in ${time(lasts)}`);
    }
    return `${row.name}: ${said.join("; ")}.`;
  };
  canvas.addEventListener("pointermove", (event) => {
    const [at, row] = place(event);
    if (event.buttons === 1 && event.pointerType !== "touch") {
      move(-event.movementX / (canvas.clientWidth - LEFT - 10));
      draw();
    }
    if (row && !row.gap) seen.textContent = about(row, at * TICKS) || seen.textContent;
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    zoom(event.deltaY > 0 ? 1.25 : 0.8, place(event)[0]);
    draw();
    tell();
    event.preventDefault();
  }, { passive: false });
  layout();
  draw();
  tell();
  new ResizeObserver(draw).observe(holder);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  matchMedia("print").addEventListener("change", (event) => { printing = event.matches; draw(); });
})();
