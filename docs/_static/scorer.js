// How the search ranks: Sphinx's own weights, and a page of the series before the reference that it shares words with.
var Scorer = {
  score: ([docname, title, anchor, description, score]) => score + (docname.startsWith("notebooks/") ? 40 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
