"""Write report.html, a page about one or more runs. No other package imports this one."""
