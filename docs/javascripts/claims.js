// Adds select boxes above the table of all claims (results/index.md) that show the rows of one paper and of one verdict
const heading = document.getElementById("all-claims")
const table = [...document.querySelectorAll("table")].find(
  each => heading && heading.compareDocumentPosition(each) & Node.DOCUMENT_POSITION_FOLLOWING)
if (table) {
  const names = [...table.tHead.rows[0].cells].map(cell => cell.textContent.trim())
  const rows = [...table.tBodies[0].rows]
  const text = (row, name) => row.cells[names.indexOf(name)].textContent.trim()
  const form = document.createElement("form")
  const count = document.createElement("output")
  const select = (name, options) => {
    const box = document.createElement("select")
    box.name = name
    box.append(new Option("all", ""), ...options.map(option => new Option(option)))
    const label = document.createElement("label")
    label.append(`${name} `, box, "\u2003")
    form.append(label)
    return box
  }
  const papers = ["DIP", "PipeWeaver", "PipeTune", "AdaPtis"]
  const paper = select("paper", papers)
  const verdict = select("verdict", [...new Set(rows.map(row => text(row, "verdict")))])
  const show = () => {
    for (const row of rows)
      row.hidden = !(text(row, "where").includes(paper.value) && ["", text(row, "verdict")].includes(verdict.value))
    count.value = `${rows.filter(row => !row.hidden).length} of ${rows.length} claims`
  }
  for (const row of table.rows)
    for (const [i, cell] of [...row.cells].entries())
      Object.assign(cell.style, { minWidth: { claim: "12em", why: "24em", where: "9em", command: "15em" }[names[i]] ?? "0", padding: "0.5em" })
  form.append(count)
  form.addEventListener("change", show)
  heading.after(form)
  show()
  // A link to a hidden claim shows all claims
  addEventListener("hashchange", () => {
    const row = document.getElementById(location.hash.slice(1))?.closest("tr")
    if (row?.hidden) {
      form.reset()
      show()
      row.scrollIntoView({ block: "center" })
    }
  })
}
