#![no_main]

vellum_fuzz::target!(dump);
