#![no_main]

vellum_fuzz::target!(dtb);
