// The theme's search is a dialog without a name.
document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
