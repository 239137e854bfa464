//! Pages in headless Chromium.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::{Failed, Need, tools};

/// A browser window.
#[derive(Clone, Copy, Debug)]
pub struct View {
    /// The width of the page in pixels.
    pub width: u32,
    /// The height of what is shown of it.
    pub height: u32,
    /// Whether the user prefers the dark scheme.
    pub dark: bool,
}

/// Requires the browser.
pub fn browser() -> Need {
    program().map(drop)
}

fn program() -> Result<PathBuf, String> {
    tools::find("chromium").ok_or_else(|| tools::lacks("chromium"))
}

impl View {
    /// Writes a screenshot of the HTML `page` to `picture`.
    pub fn screenshot(&self, page: &str, picture: &Path) -> Result<(), Failed> {
        self.show(page, picture, &[&format!("--screenshot={}", picture.display())])?;
        Ok(())
    }

    /// The HTML of the window after its scripts ran. `page` is in a frame of it.
    pub fn document(&self, page: &str, beside: &Path) -> Result<String, Failed> {
        self.show(page, beside, &["--dump-dom"])
    }

    /// Shows `page` with the options `what`. The files lie beside the path `beside`.
    fn show(&self, page: &str, beside: &Path, what: &[&str]) -> Result<String, Failed> {
        let Self { width, height, dark } = self;
        let (framed, profile) = (beside.with_extension("framed.html"), beside.with_extension("profile"));
        // A window cannot be as narrow as a phone, but a frame can.
        let inner = page.replace('&', "&amp;").replace('"', "&quot;");
        fs::write(
            &framed,
            format!(
                "<title></title><body style=\"margin:0\"><iframe srcdoc=\"{inner}\" style=\"border:0\" \
                 width={width} height={height}>"
            ),
        )?;
        let output = Command::new(program()?)
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"])
            .args(["--hide-scrollbars", "--disable-background-networking", "--disable-component-update"])
            .arg("--disable-sync")
            .arg(format!("--blink-settings=preferredColorScheme={}", u8::from(!dark)))
            .arg(format!("--user-data-dir={}", profile.display()))
            .arg(format!("--window-size={width},{height}"))
            .args(what)
            .arg(format!("file://{}", framed.display()))
            .stdin(Stdio::null())
            .output();
        let _ = fs::remove_dir_all(&profile);
        let _ = fs::remove_file(&framed);
        let output = output?;
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
            false => Err(format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr)).into()),
        }
    }
}
