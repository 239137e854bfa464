#![no_main]

vellum_fuzz::target!(gdb);
