"""Write report.html, which shows what one or more runs did. No other package imports this one."""
