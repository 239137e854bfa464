//! Moves a guest once from process to process, and combines what all three processes report.

use std::time::{Duration, Instant};

use super::answer::{self, Answer};
use super::measured::{Parts, Round};
use super::{Config, Paths};
use crate::Error;
use crate::process::{Directory, Process, printed};
use vellum_control::client::{self, Client};
use vellum_control::{Came, Do, Event, Left, Pass, Waited};
use vellum_guests::guest;
use vellum_guests::journal::MOVED;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_report::{Mark, Premise, Report, Series, json};
use vellum_sys::clock;
use vellum_sys::mmap::PAGE_SIZE;
use vellum_sys::signal;

/// The polling interval.
const LOOK: Duration = Duration::from_millis(5);

/// How long to listen to one machine at a time.
const LISTEN: Duration = Duration::from_millis(100);

/// The share of its rate by which an undisturbed guest may fall short.
const TOLERANCE: f64 = 0.1;

/// The reserve of the guest's journal for the phases of unknown length: filling memory and moving.
const AMPLE: Duration = Duration::from_secs(20);

/// The two machines.
struct Pair {
    source: Process,
    target: Process,
    directory: Directory,
}

/// Moves a guest, and adds premises that `part` failed to `report`.
pub(super) fn measure(report: &mut Report, config: &Config, part: &str) -> Result<Round, Error> {
    let mut pair = Pair::start(config)?;
    let mut source = pair.events("source")?;
    let mut target = pair.events("target")?;
    let mut stop = pair.client("target")?;
    let pages = config.region.total(false) / PAGE_SIZE;
    pair.until(|pair| {
        Ok(match pair.event(&mut source)? {
            Some(Event::Progress { done, .. }) if done >= pages => Some(()),
            _ => None,
        })
    })?;
    let alone = micros();
    pair.leave_alone(config.around)?;
    // The bandwidth of a connection (the stream gets half of it) and the minimal answer time beside
    // such a stream.
    let measured = |result: std::io::Result<Answer>| {
        result.map_err(|error| Error::Host("a userfaultfd and two connections", error))
    };
    let answer = config.follows().then(answer::measure).transpose();
    let answer = measured(answer.map(|answer| answer.unwrap_or_default()))?;
    let bandwidth = config.bandwidth.or(config.follows().then_some((answer.speed / 2.0) as u64));
    let client = Config { bandwidth, ..config.clone() };
    let told = pair.move_guest(&client)?;
    let whole = micros();
    let came = pair.until(|pair| {
        Ok(match pair.event(&mut target)? {
            Some(Event::Arrived { came }) => Some(came),
            _ => None,
        })
    })?;
    pair.leave_alone(config.around)?;
    stop.ask(&Do::Stop {}).map_err(unheard)?;
    let result = pair.result()?;
    let mut round = Moved { alone, whole, told, came, result }.round(config.follows())?;
    round.bare = answer;
    if let Some(wrong) = &round.wrong {
        report.fail(Some(part.to_owned()), wrong.clone());
    }
    if let Some(asked) = config.dirty_rate.0 {
        let got = round.before * PAGE_SIZE as f64;
        if (got / asked as f64 - 1.0).abs() > TOLERANCE {
            report.fail(Some(part.to_owned()), Premise::RateMissed { asked: asked as f64, got });
        }
    }
    report.asked.entry("tracker".into()).or_insert_with(|| round.tracker.clone().into());
    Ok(round)
}

fn micros() -> u64 {
    clock::micros(clock::monotonic())
}

fn unheard(error: client::Error) -> Error {
    Error::Host("a machine of the measurement", std::io::Error::other(error.to_string()))
}

impl Paths {
    fn of(directory: &Directory) -> Self {
        Self { listen: directory.path("in"), result: directory.path("result.json") }
    }
}

impl Pair {
    fn start(config: &Config) -> Result<Self, Error> {
        let directory = Directory::new()?;
        let (lines, paths) = (config.lines, Paths::of(&directory));
        let target = Process::start(&directory, "the target", "target", &(lines.target)(config, &paths))?;
        let slice = (config.timeout + 2 * config.around + AMPLE) / vellum_guests::control::SLICES as u32;
        let journal = slice.max(Duration::from_millis(10));
        let source = Process::start(&directory, "the source", "source", &(lines.source)(config, journal))?;
        Ok(Self { source, target, directory })
    }

    /// Polls `ready`, unless a machine ends or the user interrupts.
    fn until<T>(&mut self, mut ready: impl FnMut(&mut Self) -> Result<Option<T>, Error>) -> Result<T, Error> {
        loop {
            if let Some(signal) = signal::take() {
                return Err(guest::Error::Interrupted(signal).into());
            }
            // Checked first, so that output written before the end is available to `ready`.
            let ended = self.target.ended()?.is_some();
            if let Some(done) = ready(self)? {
                return Ok(done);
            }
            if ended {
                return Err(self.target.failed());
            }
            if let Some(status) = self.source.ended()?
                && status.code() != Some(i32::from(Exit::Moved.code()))
            {
                return Err(self.source.failed());
            }
            std::thread::sleep(LOOK);
        }
    }

    fn leave_alone(&mut self, time: Duration) -> Result<(), Error> {
        let since = Instant::now();
        self.until(|_| Ok((since.elapsed() >= time).then_some(())))
    }

    /// Connects to the machine `name` once it answers.
    fn client(&mut self, name: &str) -> Result<Client, Error> {
        let socket = self.directory.socket(name);
        self.until(|_| Ok(Client::connect(&socket).ok()))
    }

    /// Connects and listens for events.
    fn events(&mut self, name: &str) -> Result<Client, Error> {
        let socket = self.directory.socket(name);
        self.until(|_| {
            let client = Client::connect_within(&socket, LISTEN);
            Ok(client.ok().and_then(|mut client| client.ask(&Do::Events {}).is_ok().then_some(client)))
        })
    }

    /// The machine's next event, if there is one.
    fn event(&mut self, from: &mut Client) -> Result<Option<Event>, Error> {
        match from.line() {
            Ok(line) => Ok(serde_json::from_value(line).ok()),
            Err(client::Error::Silent { .. }) => Ok(None),
            Err(error) => Err(unheard(error)),
        }
    }

    /// Lets a client move the guest, and returns the source's report.
    fn move_guest(&mut self, config: &Config) -> Result<Notice, Error> {
        let words = (config.lines.client)(config, &Paths::of(&self.directory));
        let mut client = Process::start(&self.directory, "the migration", "client", &words)?;
        let status = self.until(|_| client.ended())?;
        if !status.success() {
            return Err(client.failed());
        }
        let (mut passes, mut moved) = (Vec::new(), None);
        for line in printed(&self.directory, "client")?.lines() {
            match serde_json::from_str(line) {
                Ok(Event::Pass(pass)) => passes.push(pass),
                Ok(Event::Moved { left, tracker, waited, .. }) => moved = Some((left, tracker, waited)),
                _ => {}
            }
        }
        let (left, tracker, waited) = moved.ok_or_else(|| client.failed())?;
        Ok(Notice { passes, left, tracker: tracker.unwrap_or_default(), waited: waited.unwrap_or_default() })
    }

    /// The result that the target writes when its guest has ended.
    fn result(mut self) -> Result<Report, Error> {
        let status = loop {
            if let Some(signal) = signal::take() {
                return Err(guest::Error::Interrupted(signal).into());
            }
            match self.target.ended()? {
                Some(status) => break status,
                None => std::thread::sleep(LOOK),
            }
        };
        if !status.success() && status.code() != Some(i32::from(Exit::Error.code())) {
            return Err(self.target.failed());
        }
        let unreadable = |error: json::Error| {
            Error::Host("the result of the target", std::io::Error::other(error.to_string()))
        };
        let results = json::read(&self.directory.path("result.json")).map_err(unreadable)?;
        results.into_iter().next().ok_or_else(|| self.target.failed())
    }
}

/// The client's report.
struct Notice {
    passes: Vec<Pass>,
    left: Left,
    tracker: String,
    waited: Waited,
}

/// The reports of all three.
struct Moved {
    /// When the guest had filled its memory.
    alone: u64,
    /// When the client ended, which is when all memory had arrived.
    whole: u64,
    told: Notice,
    came: Came,
    result: Report,
}

impl Moved {
    /// Puts all times on one clock, which starts when the guest runs undisturbed. The guest's clock
    /// is aligned at the moment when the target resumed it.
    fn round(self, follows: bool) -> Result<Round, Error> {
        let Self { alone, whole, told, came, mut result } = self;
        let Notice { passes, left, tracker, waited } = told;
        let missing = |what: &str| {
            Error::Host("the result of the target", std::io::Error::other(format!("it lacks {what}")))
        };
        let stood = result.marks.iter().find(|mark| mark.name == MOVED).ok_or_else(|| missing("move"))?;
        let seconds = |at: u64| (at as f64 - alone as f64) / 1e6;
        let offset = seconds(came.runs) - stood.end;
        let downtime = result.find("downtime").ok_or_else(|| missing("downtime"))?.max();
        let wrong = result.invalid.iter().find_map(|failed| match &failed.premise {
            premise @ Premise::WrongContents { .. } => Some(premise.clone()),
            _ => None,
        });
        let mut series = std::mem::take(&mut result.series);
        series.retain(|series| series.name == "progress");
        for series in &mut series {
            series.points.iter_mut().for_each(|(at, _)| *at += offset);
        }
        let rate = |from: f64, to: f64| series.iter().map(|series| average(series, from, to)).sum();
        let end = series.iter().flat_map(|series| series.points.last()).map(|point| point.0);
        let end = end.fold(f64::INFINITY, f64::min);
        let before = rate(0.0, seconds(left.began));
        // With postcopy the move lasts as long as the guest may wait for pages.
        let over = seconds(if follows { whole } else { left.pausing });
        let during = rate(seconds(left.began), over);
        let after = rate(seconds(came.runs).max(if follows { over } else { f64::MIN }), end);
        let noise = noise(&series, (0.0, seconds(left.began)), (seconds(left.began), over));
        series.iter_mut().for_each(|series| series.points.retain(|(at, _)| *at >= 0.0));
        let mark = |pass: &Pass| Mark {
            name: if pass.last { "last pass" } else { "passes" }.into(),
            start: seconds(pass.began),
            end: seconds(pass.ended),
        };
        let mut marks: Vec<Mark> = passes.iter().map(mark).collect();
        marks.push(Mark {
            name: "standing still".into(),
            start: stood.start + offset,
            end: stood.end + offset,
        });
        let span = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1e6;
        let parts = Parts {
            pause: span(left.pausing, left.paused),
            save: span(left.paused, left.saved),
            last_pass: span(left.saved, left.sent),
            transfer: span(left.sent, came.complete),
            restore: span(came.complete, came.restored),
            resume: span(came.restored, came.runs),
        };
        Ok(Round {
            downtime,
            parts,
            total: span(left.began, came.runs),
            memory_there: follows.then(|| span(left.began, whole)),
            passes,
            left,
            before,
            during,
            after,
            noise,
            tracker,
            wrong,
            waited: follows.then_some(waited),
            bare: Answer::default(),
            latencies: result.histograms.into_iter().filter(|of| of.index.is_some()).collect(),
            series,
            marks,
        })
    }
}

/// The average of a series between two times. Each point holds until the next.
fn average(series: &Series, from: f64, to: f64) -> f64 {
    let (mut sum, mut time) = (0.0, 0.0);
    for pair in series.points.windows(2) {
        let overlap = pair[1].0.min(to) - pair[0].0.max(from);
        if overlap > 0.0 {
            sum += pair[0].1 * overlap;
            time += overlap;
        }
    }
    if time > 0.0 { sum / time } else { 0.0 }
}

/// Twice the standard error of the difference between the rates in `undisturbed` and in `other`,
/// if the guest varied as in `undisturbed` throughout.
fn noise(series: &[Series], undisturbed: (f64, f64), other: (f64, f64)) -> Option<f64> {
    let squares = series.iter().map(|series| {
        let within = |(from, to): (f64, f64)| {
            let points = series.points.iter().filter(move |point| point.0 >= from && point.0 < to);
            points.map(|point| point.1)
        };
        let (samples, others) = (within(undisturbed).count() as f64, within(other).count().max(1) as f64);
        let mean = within(undisturbed).sum::<f64>() / samples;
        let variance = within(undisturbed).map(|rate| (rate - mean).powi(2)).sum::<f64>() / (samples - 1.0);
        (samples >= 3.0).then(|| variance * (1.0 / samples + 1.0 / others))
    });
    Some(2.0 * squares.sum::<Option<f64>>()?.sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_is_what_an_undisturbed_guest_may_show() {
        let of = |rates: &[f64]| Series {
            name: "progress".into(),
            index: None,
            unit: "pages/s".into(),
            points: rates.iter().enumerate().map(|(at, rate)| (at as f64, *rate)).collect(),
        };
        let varies = [of(&[90.0, 110.0, 90.0, 110.0, 50.0, 50.0])];
        let found = noise(&varies, (0.0, 4.0), (4.0, 6.0)).unwrap();
        assert!((found - 2.0 * (400.0f64 / 3.0 * (1.0 / 4.0 + 1.0 / 2.0)).sqrt()).abs() < 1e-9, "{found}");
        assert_eq!(noise(&[of(&[5.0; 6])], (0.0, 4.0), (4.0, 6.0)), Some(0.0));
        assert_eq!(noise(&varies, (0.0, 2.0), (2.0, 6.0)), None, "two samples tell nothing");
        let two = noise(&[varies[0].clone(), varies[0].clone()], (0.0, 4.0), (4.0, 6.0)).unwrap();
        assert!((two / found - 2f64.sqrt()).abs() < 1e-9);
    }

    #[test]
    fn an_average_weighs_what_lies_between() {
        let points = vec![(0.0, 10.0), (1.0, 20.0), (2.0, 0.0), (3.0, 40.0)];
        let series = Series { name: "progress".into(), index: None, unit: "pages/s".into(), points };
        assert_eq!(average(&series, 0.0, 1.0), 10.0);
        assert_eq!(average(&series, 0.5, 2.0), (5.0 + 20.0) / 1.5);
        assert_eq!(average(&series, -5.0, 50.0), 10.0);
        assert_eq!(average(&series, 7.0, 9.0), 0.0);
    }
}
