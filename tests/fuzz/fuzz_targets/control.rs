#![no_main]

vellum_fuzz::target!(control);
