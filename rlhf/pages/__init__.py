"""Self-contained HTML pages: one style, one script, figures as inline SVG. A page loads nothing from a network."""
