// One bar for each class; counts only, while they arrive.

import { whole } from "./words.js";

const MOST_SHOWN = 12; // of many classes, those with the most votes

export class Bars {
  constructor(root, names) {
    this.root = root;
    this.rows = names.map((name, label) => this.row(name, label));
    this.all = names.length <= MOST_SHOWN;
    root.replaceChildren(...this.rows.slice(0, MOST_SHOWN).map(({ element }) => element));
  }

  row(name, label) {
    const element = document.createElement("div"), [word, track, bar, number] = ["span", "span", "i", "span"].map((tag) => document.createElement(tag));
    element.className = "bar-row";
    element.setAttribute("role", "listitem");
    element.dataset.class = label;
    word.textContent = name;
    track.className = "track";
    number.className = "number";
    number.textContent = "0";
    track.append(bar);
    element.append(word, track, number);
    return { element, bar, number };
  }

  // Show counts out of `total`; `winner` is the class of the answer, if there is one.
  show(votes, total, winner = null) {
    this.rows.forEach(({ element, bar, number }, label) => {
      bar.style.width = `${(100 * votes[label]) / total}%`;
      number.textContent = whole(votes[label]);
      element.dataset.votes = votes[label];
      element.classList.toggle("winner", label === winner);
    });
    if (this.all) return;
    const order = [...this.rows.keys()].sort((a, b) => votes[b] - votes[a] || a - b).slice(0, MOST_SHOWN);
    this.root.replaceChildren(...order.map((label) => this.rows[label].element));
  }
}
