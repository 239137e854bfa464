//! What goes on beside a running workload: its doorbell, the user's signals, requests of the control socket, progress.

use std::io::{self, IsTerminal};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value, json};

use super::Region;
use super::guest::{Bell, Guest};
use super::run::{Error, RunConfig};
use crate::control::server::{Asked, Control, Listeners};
use crate::control::{Do, Event, Status};
use crate::sys::program::{SETTLING, release_start_up_code};
use crate::sys::signal::SignalFd;

/// How often those who listen hear of progress.
const TELLING: Duration = Duration::from_secs(1);
/// How often a terminal is redrawn.
const REDRAWING: Duration = Duration::from_millis(100);

/// What ended a workload before its own end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CutShort {
    /// A signal.
    Signal(i32),
    /// The control socket.
    Stop,
}

/// The event loop of a workload.
pub struct Watch {
    events: EventManager<Box<dyn MutEventSubscriber>>,
    signals: Receiver<i32>,
    asked: Receiver<Asked>,
    listeners: Listeners,
}

/// The event loop's part of the doorbell and of signals: both wake it.
struct Wake {
    bell: Arc<Bell>,
    signals: SignalFd,
    caught: Sender<i32>,
}

impl MutEventSubscriber for Wake {
    fn init(&mut self, ops: &mut EventOps<'_>) {
        // Both can be watched: they are an eventfd and a signalfd.
        let _ = ops.add(Events::new(&self.bell.event, EventSet::IN));
        let _ = ops.add(Events::new(&self.signals, EventSet::IN));
    }

    fn process(&mut self, _: Events, _: &mut EventOps<'_>) {
        let _ = self.bell.event.read();
        if let Some(signal) = self.signals.read() {
            // The receiver lives as long as the loop.
            let _ = self.caught.send(signal);
        }
    }
}

impl Watch {
    /// A loop that hears of `signals` and serves `control`, whose requests come through `asked`.
    pub fn new(
        bell: Arc<Bell>,
        signals: SignalFd,
        control: Option<Control>,
        asked: Receiver<Asked>,
    ) -> Result<Self, Error> {
        let (caught, signals_caught) = channel();
        let mut events = EventManager::<Box<dyn MutEventSubscriber>>::new()?;
        events.add_subscriber(Box::new(Wake { bell, signals, caught }));
        let listeners = control.as_ref().map(Control::listeners).unwrap_or_default();
        if let Some(control) = control {
            events.add_subscriber(Box::new(control));
        }
        Ok(Self { events, signals: signals_caught, asked, listeners })
    }

    /// Those who listen for events.
    pub fn listeners(&self) -> &Listeners {
        &self.listeners
    }

    /// Watches over `guest` until every vCPU has rung; what brought that about early, if something did.
    pub fn run(
        &mut self,
        config: &RunConfig,
        guest: &Guest,
        regions: &[Region],
    ) -> Result<Option<CutShort>, Error> {
        let accesses: u64 = regions.iter().map(|region| region.pages * config.write.passes).sum();
        let bar = pages_bar(accesses, config.duration);
        let start = Instant::now();
        let mut machine = Machine { guest, paused: false };
        let mut cut_short = None;
        let mut settled = false;
        let mut told = start;
        while !guest.all_rung()? {
            let left = config.duration.map(|duration| duration.saturating_sub(start.elapsed()));
            let over = left == Some(Duration::ZERO);
            if over || cut_short.is_some() {
                machine.stop();
            }
            // Without a terminal and listeners, only events and the deadline matter.
            let waits = [
                left.filter(|_| !over),
                (over || cut_short.is_some() || !bar.is_hidden()).then_some(REDRAWING),
                (!settled).then_some(SETTLING),
                (!self.listeners.is_empty()).then(|| TELLING.saturating_sub(told.elapsed())),
            ];
            // Rounded up, so that the deadline has passed when the wait is over.
            let wait = waits.into_iter().flatten().min().map_or(-1, |wait| wait.as_millis() as i32 + 1);
            if self.events.run_with_timeout(wait)? == 0 && !settled {
                // Out of the guest's way while it starts, for unmapping makes its vCPUs fault too.
                settled = true;
                release_start_up_code();
            }
            if let Ok(signal) = self.signals.try_recv() {
                // Asked twice: do not wait for a guest that does not listen.
                if matches!(cut_short.replace(CutShort::Signal(signal)), Some(CutShort::Signal(_))) {
                    return Ok(cut_short);
                }
            }
            while let Ok(asked) = self.asked.try_recv() {
                if asked.what == (Do::Stop {}) {
                    cut_short.get_or_insert(CutShort::Stop);
                }
                let answer = machine.obey(&asked.what, &self.listeners);
                asked.answer(answer);
            }
            let done = guest.controls().map(|control| control.done.load(Ordering::Relaxed)).sum();
            bar.set_position(done);
            if told.elapsed() >= TELLING {
                told = Instant::now();
                self.listeners.tell(&Event::Progress { done, of: (accesses > 0).then_some(accesses) });
            }
        }
        bar.finish_and_clear();
        guest.wait_all_rung()?;
        Ok(cut_short)
    }
}

/// What requests are about.
struct Machine<'a> {
    guest: &'a Guest,
    paused: bool,
}

impl Machine<'_> {
    fn obey(&mut self, what: &Do, listeners: &Listeners) -> Result<Value, String> {
        match what {
            Do::Pause {} => {
                let us = self.guest.pause().map_err(|error| error.to_string())?.as_micros() as u64;
                if !std::mem::replace(&mut self.paused, true) {
                    listeners.tell(&Event::Paused { us });
                }
                Ok(json!({ "us": us }))
            }
            Do::Resume {} => {
                if self.resume() {
                    listeners.tell(&Event::Resumed {});
                }
                Ok(json!({}))
            }
            Do::Status {} => Ok(serde_json::to_value(self.status()).expect("plain data")),
            Do::Stop {} | Do::Events {} => Ok(json!({})),
            Do::Balloon { .. } => Err("the built-in guest has no balloon: start one with --kernel".into()),
            Do::Serial {} => Err("the built-in guest has no serial port: start one with --kernel".into()),
        }
    }

    fn status(&self) -> Status {
        Status {
            pid: std::process::id(),
            state: if self.paused { "paused" } else { "running" }.into(),
            vcpus: self.guest.vcpus.len(),
            memory: self.guest.vm.memory.config.size,
            balloon: None,
            vsock: None,
        }
    }

    /// False if it was not paused.
    fn resume(&mut self) -> bool {
        let paused = std::mem::take(&mut self.paused);
        if paused {
            self.guest.resume_unfinished();
        }
        paused
    }

    /// Only a guest that runs sees that it is to stop.
    fn stop(&mut self) {
        self.guest.request_stop();
        self.resume();
    }
}

/// A bar on a terminal; nothing in a pipe.
pub fn bar(length: u64, template: &str) -> ProgressBar {
    let target =
        if io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::with_draw_target((length > 0).then_some(length), target).with_style(style)
}

fn pages_bar(accesses: u64, duration: Option<Duration>) -> ProgressBar {
    let template = if accesses > 0 {
        "{bar:30} {percent:>3} %  {human_pos} pages  {per_sec}  {eta} left"
    } else if duration.is_some() {
        "{elapsed_precise}  {human_pos} pages  {per_sec}"
    } else {
        "{elapsed_precise}  {human_pos} pages  {per_sec}  (Ctrl-C ends it)"
    };
    bar(accesses, template)
}

/// The bar of populating memory.
pub fn bytes_bar(what: &str, bytes: u64) -> ProgressBar {
    bar(bytes, &format!("{what} {{bar:30}} {{binary_bytes}} of {{binary_total_bytes}}  {{eta}} left"))
}
